"""Query models and the language model helpers."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer

from nekro_agent.core.config import config
from nekro_agent.errors import InvalidValueError, LLMError, NotFoundError
from nekro_agent.models.db_chat_channel import DBChatChannel, DefaultPreset
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_plugin_data import DBPluginData
from nekro_agent.models.db_preset import DBPreset
from nekro_agent.models.db_user import DBUser
from nekro_agent.plugin import NekroPlugin
from nekro_agent.policies import CoreConfig, ModelConfigGroup
from nekro_agent.ports import ChatInfo, MessageKind
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.services.agent.creator import ContentSegment, OpenAIChatMessage
from nekro_agent.services.agent.openai import gen_openai_chat_response, gen_openai_embeddings
from nekro_agent.testing import InMemoryRuntime
from nekro_agent.tools import common_util


@pytest.fixture
def history(world: InMemoryRuntime) -> InMemoryRuntime:
    for number in range(6):
        who = {"sender_id": f"u{number % 2}", "sender_name": f"name{number % 2}"}
        world.messages.add("chat", MessageKind.USER, f"text {number}", **who)
    world.messages.add("chat", MessageKind.ASSISTANT, "answer")
    world.messages.add("other", MessageKind.SYSTEM, "note")
    return world


async def test_messages_are_queried_in_the_forms_of_plugins(history: InMemoryRuntime) -> None:
    newest = (
        await DBChatMessage.filter(chat_key="chat", is_recalled=False).order_by("-send_timestamp").limit(2)
    )
    assert [m.chat_key for m in newest] == ["chat", "chat"]
    row = await DBChatMessage.filter(chat_key="chat").exclude(sender_id="-1").order_by("-id").first()
    assert row is not None and (row.content_text, row.platform_userid, row.sender_name) == (
        "text 5",
        "u1",
        "name1",
    )
    assert await DBChatMessage.filter(chat_key="chat", id__gt=4).count() == 3
    texts = (
        await DBChatMessage.filter(chat_key="chat")
        .order_by("id")
        .offset(1)
        .limit(2)
        .values_list("content_text", flat=True)
    )
    assert texts == ["text 1", "text 2"]
    keys = await DBChatMessage.filter(send_timestamp__gte=0).distinct().values("chat_key")
    assert sorted(key["chat_key"] for key in keys) == ["chat", "other"]
    assert await DBChatMessage.filter(content_text__icontains="TEXT", sender_id__in=["u0"]).count() == 3
    assert [m.content_text for m in await DBChatMessage.filter(sender_id="-1").all()] == ["answer"]
    assert await DBChatMessage.filter(chat_key="none").exists() is False
    assert await DBChatMessage.get_or_none(id=1) is not None
    assert await DBChatMessage.all().count() == 8


async def test_invalid_queries_are_named(history: InMemoryRuntime) -> None:
    with pytest.raises(InvalidValueError, match=r"DBChatMessage has no field .colour"):
        DBChatMessage.filter(colour=1)
    with pytest.raises(InvalidValueError, match="no comparison 'regex'"):
        DBChatMessage.filter(chat_key__regex="x")
    with pytest.raises(InvalidValueError, match="no field 'colour'"):
        DBChatMessage.filter().order_by("-colour")
    with pytest.raises(NotFoundError):
        await DBChatMessage.get(id=99)
    with pytest.raises(InvalidValueError, match="cannot be deleted"):
        await DBChatMessage.filter(id=1).delete()


async def test_chats_users_and_presets_are_found(history: InMemoryRuntime) -> None:
    history.records.known_chats["group"] = ChatInfo(
        chat_key="group", container_key="box", adapter_key="onebot_v11", channel_type="group", channel_id="1"
    )
    channel = await DBChatChannel.get_channel(chat_key="group")
    assert (channel.chat_type.value, channel.channel_id, channel.adapter_key) == ("group", "1", "onebot_v11")
    assert (await DBChatChannel.get_channel("unknown-private_1")).chat_type.value == "private"
    assert {c.chat_key for c in await DBChatChannel.filter(is_active=True).all()} == {
        "chat",
        "other",
        "group",
    }
    preset = await channel.get_preset()
    assert isinstance(preset, DefaultPreset) and preset.name == "Agent"
    assert await DBPreset.filter(name="x").all() == []
    user = await DBUser.get_by_union_id(adapter_key="", platform_userid="u1")
    assert user is not None and (user.username, user.user_id) == ("name1", "u1")
    assert await DBUser.get_by_union_id(adapter_key="discord", platform_userid="u1") is None
    ctx = await AgentCtx.create_by_chat_key("group")
    assert (ctx.chat_key, ctx.channel_type, ctx.adapter_key) == ("group", "group", "onebot_v11")
    assert ctx.db_chat_channel.channel_id == "1" and ctx.db_user is None
    assert (await ctx.current_preset()).id == -1
    for call in (ctx.get_onebot_v11_bot, lambda: ctx.set_preset(3)):
        with pytest.raises(InvalidValueError):
            await call()
    assert await ctx.get_bound_workspace() is None


async def test_stored_values_are_found_and_deleted(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    for chat in ("a", "b"):
        await plugin.store.set(chat_key=chat, store_key="k", value=chat.upper())
    row = await DBPluginData.get_or_none(plugin_key=plugin.key, data_key="k", target_chat_key="a")
    assert row is not None and row.data_value == "A"
    assert await DBPluginData.filter(plugin_key=plugin.key, target_chat_key__in=["b"]).delete() == 1
    assert await plugin.store.get(chat_key="b", store_key="k") is None
    assert await plugin.store.get(chat_key="a", store_key="k") == "A"


def test_messages_are_built_from_parts(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpg")
    message = (
        OpenAIChatMessage.create_empty("user")
        .add(ContentSegment.text_content("a"))
        .batch_add([ContentSegment.text_content("b"), ContentSegment.text_content("")])
        .add(ContentSegment.image_content_from_path(tmp_path / "a.jpg"))
        .extend(OpenAIChatMessage.from_text("user", "c"))
        .tidy()
    )
    assert [part["type"] for part in message.content] == ["text", "image_url", "text"]
    assert message.content[0]["text"] == "ab"
    assert message.content[1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert OpenAIChatMessage.from_text("system", "x").to_dict() == {"role": "system", "content": "x"}
    with pytest.raises(InvalidValueError, match="cannot append"):
        message.extend(OpenAIChatMessage.from_text("assistant", "x"))
    with pytest.raises(FileNotFoundError):
        ContentSegment.image_content_from_path(tmp_path / "a.txt")


def test_an_image_type_is_detected_by_content_then_by_suffix(tmp_path: Path) -> None:
    signatures = {
        "png": b"\x89PNG\r\n\x1a\n",
        "jpeg": b"\xff\xd8\xff",
        "gif": b"GIF8",
        "webp": b"RIFF____WEBP",
    }
    for kind, content in signatures.items():
        (tmp_path / "download").write_bytes(content)
        part = ContentSegment.image_content_from_path(str(tmp_path / "download"))
        assert part["image_url"]["url"].startswith(f"data:image/{kind};base64,")
    assert ContentSegment.image_content_from_path("data:image/png;base64,AA==")["image_url"] == {
        "url": "data:image/png;base64,AA=="
    }
    (tmp_path / "note.txt").write_text("x")
    with pytest.raises(InvalidValueError, match="does not look like an image"):
        ContentSegment.image_content_from_path(tmp_path / "note.txt")


def endpoint(server: FileServer, answers: dict[str, Any]) -> str:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.dumps(answers[handler.path]).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    for path in answers:
        server.answer_with(path, answer)
    return server.base + "/v1"


async def test_a_plugin_calls_a_model(plugin: NekroPlugin, file_server: FileServer) -> None:
    base_url = endpoint(
        file_server,
        {
            "/v1/chat/completions": {
                "id": "1", "object": "chat.completion", "created": 1, "model": "m",
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
                ],
                "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
            },
            "/v1/embeddings": {
                "object": "list", "model": "m", "usage": {"prompt_tokens": 1, "total_tokens": 1},
                "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}],
            },
        },
    )  # fmt: skip
    group = ModelConfigGroup(CHAT_MODEL="m", BASE_URL=base_url, API_KEY="secret")
    async with InMemoryRuntime(plugin, core=CoreConfig(MODEL_GROUPS={"default": group})):
        found = config.get_model_group_info("default")
        assert "secret" not in repr(found)
        response = await gen_openai_chat_response(
            model=found.CHAT_MODEL,
            messages=[OpenAIChatMessage.from_text("user", "hello"), {"role": "user", "content": "x"}],
            base_url=found.BASE_URL,
            api_key=found.API_KEY,
            stream_mode=False,
        )
        assert (response.response_content, response.token_consumption) == ("hi", 3)
        vector = await gen_openai_embeddings(model="m", input="x", base_url=found.BASE_URL, dimensions=2)
        assert vector == [0.5, 0.25]
        with pytest.raises(KeyError, match=r"no model group .none. .there are: default"):
            config.get_model_group_info("none")
        with pytest.raises(AttributeError, match=r"core\.config has no QDRANT_URL: this system"):
            _ = config.QDRANT_URL  # type: ignore[attr-defined]
        with pytest.raises(LLMError, match="model m at"):
            await gen_openai_chat_response(model="m", messages=[], base_url=file_server.base + "/none")


async def test_helpers_of_the_reference_api_work(
    world: InMemoryRuntime, file_server: FileServer, tmp_path: Path
) -> None:
    url = file_server.add("/a", b"abc")
    path, name = await common_util.download_file(url, from_chat_key="chat", use_suffix=".bin")
    assert Path(path).read_bytes() == b"abc" and name.endswith(".bin")
    path, name = await common_util.download_file_from_bytes(b"x", file_name="../n.txt", from_chat_key="chat")
    assert (Path(path).parent, name) == (world.areas.uploads_dir("chat"), "n.txt")
    path, _ = await common_util.download_file_from_bytes(b"y", file_path=tmp_path / "d" / "f")
    copied, name = await common_util.copy_to_upload_dir(path, from_chat_key="chat")
    assert name == await asyncio.to_thread(common_util.calculate_file_md5, path)
    assert Path(copied).read_bytes() == b"y"
    with pytest.raises(InvalidValueError, match="from_chat_key"):
        await common_util.download_file(url)
    assert common_util.limited_text_output("abcdefghij", 7, "…") == "abc…hij"
    assert common_util.calculate_text_similarity("abc", "abc") == 1.0
    assert common_util.calculate_text_similarity("abc", "abc", min_length=4) == 0.0
