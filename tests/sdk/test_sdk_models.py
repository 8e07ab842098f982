"""Query models and the language model helpers."""

from __future__ import annotations

import asyncio
import json
import ssl
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer

from nekro_agent.core.config import config
from nekro_agent.errors import InvalidValueError, LLMError, NotFoundError
from nekro_agent.models.db_chat_channel import ChannelStatus, DBChatChannel, DefaultPreset
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_plugin_data import DBPluginData
from nekro_agent.models.db_preset import DBPreset
from nekro_agent.models.db_user import DBUser
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import MessageKind
from nekro_agent.runtime import CoreConfig, ModelConfigGroup
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import (
    ChatMessage,
    ChatMessageSegmentAt,
    ChatMessageSegmentImage,
    ChatMessageSegmentPoke,
    ChatType,
)
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
    with pytest.raises(InvalidValueError, match="no field 'colour'"):
        await DBChatMessage.filter(id=1).update(colour=1)
    with pytest.raises(InvalidValueError, match="no field 'colour'"):
        await DBPreset.create(name="x", colour=1)
    row = await DBChatMessage.get(id=1)
    row.chat_key = "elsewhere"
    with pytest.raises(
        InvalidValueError, match=r"chat_key cannot be changed here; plugins may change content"
    ):
        await row.save()


async def test_chats_users_and_presets_are_found(history: InMemoryRuntime) -> None:
    await history.records.change_chat(
        "group", {"adapter_key": "onebot_v11", "channel_type": "group", "channel_id": "1"}
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
    await history.records.change_user("", "u1", {"username": "name1"})
    user = await DBUser.get_by_union_id(adapter_key="", platform_userid="u1")
    assert user is not None and (user.username, user.user_id) == ("name1", "u1")
    assert await DBUser.get_by_union_id(adapter_key="discord", platform_userid="u1") is None
    ctx = await AgentCtx.create_by_chat_key("group")
    assert (ctx.chat_key, ctx.channel_type, ctx.adapter_key) == ("group", "group", "onebot_v11")
    assert ctx.db_chat_channel.channel_id == "1" and ctx.db_user is None
    assert (await ctx.current_preset()).id == -1
    with pytest.raises(InvalidValueError):
        ctx.get_onebot_v11_bot()
    with pytest.raises(InvalidValueError, match="no preset 3"):
        await ctx.set_preset(3)
    assert await ctx.get_bound_workspace() is None


async def test_people_are_rows_that_plugins_change(world: InMemoryRuntime) -> None:
    made = await DBUser.create(adapter_key="onebot_v11", platform_userid="7", username="Ada")
    assert made.id and (made.unique_id, made.is_active, made.is_prevent_trigger) == (
        "onebot_v11:7",
        True,
        False,
    )
    made.ban_until = datetime(2999, 1, 1)  # without a zone, as plugins write it
    await made.save(update_fields=["ban_until"])
    found = await DBUser.get(id=made.id)
    assert found.ban_until == datetime(2999, 1, 1, tzinfo=UTC) and not found.is_active
    assert await DBUser.filter(platform_userid=7).update(ban_until=None, ext_data={"level": 2}) == 1
    again, is_new = await DBUser.get_or_create(adapter_key="onebot_v11", platform_userid="7")
    assert (is_new, again.is_active, again.ext_data) == (False, True, {"level": 2})
    assert again.username == "Ada"
    _, is_new = await DBUser.update_or_create({"username": "Bob"}, adapter_key="x", platform_userid="8")
    assert is_new and await DBUser.exists(username="Bob")
    await again.delete()
    assert await DBUser.get_or_none(id=made.id) is None


async def test_a_changed_row_keeps_what_others_changed_meanwhile(world: InMemoryRuntime) -> None:
    await DBUser.create(platform_userid="7", username="Ada")
    mine, theirs = await DBUser.get(platform_userid="7"), await DBUser.get(platform_userid="7")
    theirs.perm_level = 3
    await theirs.save()
    mine.username = "Eve"
    await mine.save()
    assert (await DBUser.get(platform_userid="7")).perm_level == 3


async def test_channels_have_a_status_and_a_preset(history: InMemoryRuntime) -> None:
    channel = await DBChatChannel.get_channel("onebot_v11-group_5")
    assert (channel.adapter_key, channel.channel_id, channel.channel_type) == (
        "onebot_v11",
        "group_5",
        "group",
    )
    assert channel.id == (await DBChatChannel.get_channel("onebot_v11-group_5")).id > 0
    assert channel.channel_status is ChannelStatus.ACTIVE
    await channel.set_channel_status("observe")
    stored = await DBChatChannel.get(chat_key="onebot_v11-group_5")
    assert (stored.is_active, stored.observe_mode) == (True, True)
    await stored.set_active(False)
    assert (await DBChatChannel.get(id=channel.id)).channel_status is ChannelStatus.DISABLED
    with pytest.raises(ValueError, match="sleeping"):
        await stored.set_channel_status("sleeping")

    preset = await DBPreset.create(name="Pirate", content="You are a pirate.", tags="sea")
    assert "Pirate" in await stored.set_preset(preset.id)
    assert (await (await DBChatChannel.get_channel(stored.chat_key)).get_preset()).content == preset.content
    preset.content = "You are a captain."
    await preset.save()
    ctx = await AgentCtx.create_by_chat_key(stored.chat_key)
    assert (await ctx.current_preset()).content == "You are a captain."
    found = await ctx.get_preset_by_id(preset.id)
    assert found is not None and found.name == "Pirate" and await ctx.get_preset_by_id(99) is None
    assert (await ctx.get_effective_preset_by_id(99)).id == -1
    await preset.delete()
    assert (await ctx.current_preset()).id == -1
    await ctx.set_preset(-1)
    assert (await DBChatChannel.get_channel(stored.chat_key)).preset_id is None
    assert (await stored.get_effective_config()).AI_CHAT_CONTEXT_MAX_LENGTH == 32

    made = await DBChatChannel.get_or_create("discord", "42", ChatType.GROUP, "Friends")
    assert (made.chat_key, made.chat_type, await made.get_channel_name()) == (
        "discord-42",
        ChatType.GROUP,
        "Friends",
    )
    before = made.conversation_start_time
    await made.reset_channel()
    assert (await DBChatChannel.get_channel("discord-42")).conversation_start_time > before


async def test_messages_have_content_and_are_deleted(world: InMemoryRuntime) -> None:
    content = [
        {"type": "text", "text": "look "},
        {"type": "at", "text": "@Ada", "target_platform_userid": "7", "target_nickname": "Ada"},
        {"type": "image", "text": "", "file_name": "a.png"},
    ]
    row = await DBChatMessage.create(
        chat_key="onebot_v11-private_1",
        sender_id="7",
        sender_name="Ada",
        platform_userid="7",
        is_tome=1,
        content_text="look @Ada",
        content_data=json.dumps(content),
        ext_data=json.dumps({"ref_msg_id": "m0"}),
        message_id="77",
    )
    assert (row.message_id, row.chat_type, row.adapter_key, row.is_tome) == ("77", "private", "onebot_v11", 1)
    assert not row.is_system and row.ext_data_obj.ref_msg_id == "m0"
    row.ext_data = json.dumps({"ref_msg_id": "m0", "platform": "half \ud83d"})
    assert row.ext_data_obj.ref_msg_id == "m0"
    text, mention, image = row.parse_content_data()
    assert isinstance(mention, ChatMessageSegmentAt) and mention.target_platform_userid == "7"
    assert isinstance(image, ChatMessageSegmentImage) and image.local_path is not None
    assert Path(image.local_path) == world.areas.uploads_dir("onebot_v11-private_1") / "a.png"
    assert (text.type, text.text) == ("text", "look ")
    assert 'Ada": look @Ada' in row.parse_chat_history_prompt("code", ref_mode=True)
    row.is_recalled, row.content_text = True, "gone"
    await row.save()
    assert (await DBChatMessage.get(id=row.id)).is_recalled
    assert await DBChatMessage.filter(sender_id=7, chat_type="private").count() == 1
    agent = await DBChatMessage.create(
        chat_key="onebot_v11-private_1", sender_id=-1, content_text="hi", content_data=[], ext_data={}
    )
    assert await DBChatMessage.filter(sender_id=-1).first() == agent
    note = await DBChatMessage.create(
        chat_key="onebot_v11-private_1", sender_id="-1", sender_name="SYSTEM", content_text="note"
    )
    assert note.is_system and note.parse_content_data() == []
    await row.delete()
    assert [m.content_text for m in await DBChatMessage.filter(chat_key="onebot_v11-private_1")] == [
        "note",
        "hi",
    ]
    with pytest.raises(InvalidValueError, match="DBChatMessage: chat_key: Field required"):
        await DBChatMessage.create(content_text="hi")
    agent.content_data = "{"
    with pytest.raises(InvalidValueError, match="not JSON"):
        agent.parse_content_data()


async def test_stored_values_are_created_and_changed(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    row = await DBPluginData.create(
        plugin_key=plugin.key, data_key="k", data_value="1", target_chat_key="c", target_user_id="u"
    )
    assert row.id > 0 and await plugin.store.get(chat_key="c", user_key="u", store_key="k") == "1"
    row.data_value = "2"
    await row.save()
    assert await plugin.store.get(chat_key="c", user_key="u", store_key="k") == "2"
    assert (await DBPluginData.get(id=row.id)).data_value == "2"
    same, is_new = await DBPluginData.update_or_create(
        {"data_value": "3"}, plugin_key=plugin.key, data_key="k", target_chat_key="c", target_user_id="u"
    )
    assert not is_new and same.data_value == "3"


async def test_stored_values_are_found_and_deleted(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    for chat in ("a", "b"):
        await plugin.store.set(chat_key=chat, store_key="k", value=chat.upper())
    row = await DBPluginData.get_or_none(plugin_key=plugin.key, data_key="k", target_chat_key="a")
    assert row is not None and row.data_value == "A"
    assert await DBPluginData.filter(plugin_key=plugin.key, target_chat_key__in=["b"]).delete() == 1
    assert await plugin.store.get(chat_key="b", store_key="k") is None
    assert await plugin.store.get(chat_key="a", store_key="k") == "A"


def test_messages_are_built_from_parts(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0")
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


async def test_a_plugin_calls_a_model(
    plugin: NekroPlugin, file_server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")  # its import reads them too
    read_authorities, reads = ssl.create_default_context, 0

    def count_reads(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        nonlocal reads
        reads += 1
        return read_authorities(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", count_reads)
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
        with pytest.raises(KeyError, match=r"no model group 'a_b'; .*NEKRO_MODELS__A_B__MODEL.*: default"):
            config.get_model_group_info("a_b")
        with pytest.raises(AttributeError, match=r"core\.config has no REDIS_URL: this system"):
            _ = config.REDIS_URL  # type: ignore[attr-defined]
        with pytest.raises(LLMError, match="model m at"):
            await gen_openai_chat_response(model="m", messages=[], base_url=file_server.base + "/none")
    assert reads <= 1  # for three requests: each read would block the loop


@pytest.mark.parametrize(
    "answer",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": {"content": ["x"]}}]}, [1], "text"],
)
async def test_a_model_that_answers_something_else_is_an_error_of_the_model(
    world: InMemoryRuntime, file_server: FileServer, answer: Any
) -> None:
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        file_server.add(path, json.dumps(answer).encode(), content_type="application/json")
    with pytest.raises(LLMError, match="model m"):
        await gen_openai_chat_response(model="m", messages=[], base_url=file_server.base + "/v1")
    with pytest.raises(LLMError, match="model m"):
        await gen_openai_embeddings(model="m", input="x", base_url=file_server.base + "/v1")


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


def test_segments_of_a_message_survive_the_way_to_another_process() -> None:
    content = [{"type": "at", "text": "@Ada", "target_platform_userid": "7"}, {"type": "voice", "text": "…"}]
    message = ChatMessage(chat_key="onebot_v11-group_1", content_data=content)
    again = ChatMessage.model_validate(message.model_dump(mode="json"))
    mention, voice = again.content_data
    assert isinstance(mention, ChatMessageSegmentAt) and mention.target_platform_userid == "7"
    assert (voice.type, again.is_empty(), ChatMessage.create_empty("c").is_empty()) == ("voice", False, True)
    with pytest.raises(ValueError, match="song"):
        ChatMessage(chat_key="c", content_data=[{"type": "song"}])


def test_a_poke_is_a_segment() -> None:
    """Of a platform whose people poke each other; a hook that gets the message gets the segment."""
    poke = {"type": "poke", "text": "Ada pokes you", "target_id": "7", "poke_style_suffix": "twice"}
    message = ChatMessage(chat_key="c", content_data=[poke])
    (segment,) = message.content_data
    assert isinstance(segment, ChatMessageSegmentPoke)
    assert (segment.target_id, segment.poke_style_suffix, segment.action_img_url) == ("7", "twice", "")
