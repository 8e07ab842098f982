"""Names of the reference that few plugins use: each with its arguments and its effect."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import ChatServer, refuse, respond
from file_server import FileServer

from nekro_agent.adapters.onebot_v11.tools import onebot_util
from nekro_agent.adapters.onebot_v11.tools.user import get_avatar
from nekro_agent.api import message, user
from nekro_agent.api.i18n import (
    SupportedLang,
    get_system_lang,
    get_text,
    i18n_text,
    resolve_i18n,
    set_system_lang,
    t,
)
from nekro_agent.api.plugin import CmdCtl, NekroPlugin
from nekro_agent.api.schemas import AgentCtx, AgentMessageSegment, AgentMessageSegmentType
from nekro_agent.core.tortoise_config import resolve_db_url
from nekro_agent.errors import DownloadError, InvalidValueError
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_preset import DBPreset
from nekro_agent.ports import MessageKind
from nekro_agent.runtime import CoreConfig, ModelConfigGroup
from nekro_agent.schemas.chat_message import ChatMessageSegmentFile, ChatMessageSegmentImage, ChatType
from nekro_agent.services.memory.embedding_service import (
    EmbeddingService,
    embed_batch,
    embed_text,
    embedding_service,
    get_memory_embedding_dimension,
)
from nekro_agent.services.message_service import MessageService, message_service
from nekro_agent.services.plugin.task import TaskAPI, TaskRunner, task
from nekro_agent.testing import InMemoryRuntime

CHAT = "onebot_v11-group_5"
PNG = b"\x89PNG picture"


@pytest.fixture
def ctx(world: InMemoryRuntime, plugin: NekroPlugin) -> AgentCtx:
    return world.context(chat_key=CHAT, plugin_key=plugin.key)


@pytest.fixture
def system_language() -> Iterator[None]:
    before = get_system_lang()
    yield
    set_system_lang(before)


# -- texts in several languages -------------------------------------------------------------


def test_a_missing_language_gives_the_default_and_nothing_else() -> None:
    assert get_text(i18n_dict={"en-US": "hi"}, default="x", lang=SupportedLang.EN_US) == "hi"
    assert get_text({"en-US": "hi"}, "", SupportedLang.ZH_CN) == ""
    assert get_text({"en-US": "hi"}, "x") == "x"
    assert get_text(None, "x", SupportedLang.EN_US) == get_text({}, "x") == "x"


@pytest.mark.usefixtures("system_language")
def test_texts_follow_the_language_of_the_system() -> None:
    texts = i18n_text(zh_CN="好", en_US="fine")
    assert (t(zh_CN="好", en_US="fine"), resolve_i18n(texts), CmdCtl.success(texts).message) == ("好",) * 3
    set_system_lang(SupportedLang.EN_US)
    assert get_system_lang() is SupportedLang.EN_US
    assert (t(zh_CN="好", en_US="fine"), resolve_i18n(texts), CmdCtl.success(texts).message) == ("fine",) * 3
    assert t(SupportedLang.ZH_CN, zh_CN="好", en_US="fine") == "好"
    assert resolve_i18n("as it is") == "as it is" and resolve_i18n(None) == ""
    assert resolve_i18n({"zh-CN": "只有"}) == "只有"
    with pytest.raises(InvalidValueError, match=r"'fr' is not supported; choose one of zh-CN, en-US"):
        set_system_lang("fr")


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("en,zh;q=0.5", "en-US"),
        ("en-GB", "en-US"),
        ("zh-TW,zh;q=0.9,en;q=0.8", "zh-CN"),
        ("zh;q=0.2, en;q=0.9", "en-US"),
        ("fr", "zh-CN"),
        ("en;q=0", "zh-CN"),
        ("en;q=many", "zh-CN"),
        ("", "zh-CN"),
    ],
)
def test_a_header_chooses_the_preferred_language(header: str, language: str) -> None:
    assert SupportedLang.from_accept_language(header).value == language


# -- messages ---------------------------------------------------------------------------------


async def test_a_message_of_segments_is_recorded(world: InMemoryRuntime) -> None:
    parts = [
        AgentMessageSegment(type=AgentMessageSegmentType.TEXT, content="look: "),
        AgentMessageSegment(type=AgentMessageSegmentType.IMAGE, content="shared/a.png"),
    ]
    await message_service.push_bot_message(chat_key=CHAT, agent_messages=parts)
    assert world.messages.texts(CHAT, MessageKind.ASSISTANT) == ["look: [Image: shared/a.png]"]


@pytest.mark.parametrize("name", ["image_path", "file_path"])
async def test_an_image_is_sent_by_either_name_of_its_path(
    world: InMemoryRuntime, ctx: AgentCtx, name: str
) -> None:
    path = await ctx.fs.mixed_forward_file(PNG, "a.png")
    await message.send_image(CHAT, ctx=ctx, **{name: path})
    await message.send_image(CHAT, path, ctx)
    assert [(one.file_path, one.file_kind) for one in world.messages.sent] == [(path, "image")] * 2
    with pytest.raises(InvalidValueError, match="the path must be text or a Path, not NoneType"):
        await message.send_image(CHAT, ctx=ctx)


@pytest.fixture
def seen() -> Iterator[list[tuple[Any, ...]]]:
    """What a wrapper has seen; the wrapper of the test is removed afterwards."""
    yield []
    vars(message_service).clear()


async def test_a_wrapper_with_an_old_signature_sees_each_message_once(
    world: InMemoryRuntime, ctx: AgentCtx, seen: list[tuple[Any, ...]]
) -> None:
    original = message_service.push_bot_message

    async def wrapper(chat_key: str, agent_messages: Any, db_chat_channel: Any = None) -> None:
        await original(chat_key, agent_messages, db_chat_channel=db_chat_channel)
        seen.append((chat_key, [(str(one.type), one.content) for one in agent_messages]))

    message_service.push_bot_message = wrapper  # type: ignore[method-assign,assignment]
    path = await ctx.fs.mixed_forward_file(PNG, "a.png")
    await ctx.send_text("one")
    await message.send_image(CHAT, path, ctx)
    await ctx.send_text("not recorded", record=False)
    await message_service.push_bot_message(CHAT, [AgentMessageSegment(content="two")])
    host = ctx.fs.get_file(path)
    assert seen == [
        (CHAT, [("text", "one")]),
        (CHAT, [("image", str(host))]),
        (CHAT, [("text", "two")]),
    ]
    assert world.messages.texts(CHAT, MessageKind.ASSISTANT) == ["one", "[a.png]", "two"]


async def test_a_wrapper_learns_the_id_and_may_record_further_messages(
    world: InMemoryRuntime, ctx: AgentCtx, seen: list[tuple[Any, ...]]
) -> None:
    original = message_service.push_bot_message

    async def wrapper(*args: Any, **options: Any) -> None:
        seen.append((options["plt_response"].message_id, options["ref_msg_id"]))
        await original(*args, normalize_at_markup=True, **options)
        await original(CHAT, "a remark")

    message_service.push_bot_message = wrapper  # type: ignore[method-assign]
    await message.send_text(CHAT, "one", ctx, ref_msg_id="m7")
    recorded = await DBChatMessage.filter(chat_key=CHAT).order_by("id")
    assert [one.content_text for one in recorded] == ["one", "a remark"]
    assert seen == [(recorded[0].message_id, "m7")]


async def test_a_wrapper_that_fails_does_not_fail_the_message(
    world: InMemoryRuntime, ctx: AgentCtx, seen: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapper(self: MessageService, chat_key: str, agent_messages: Any) -> None:
        seen.append((chat_key,))
        raise RuntimeError("no")

    monkeypatch.setattr(MessageService, "push_bot_message", wrapper)
    await ctx.send_text("one")
    assert seen == [(CHAT,)]
    assert world.messages.texts(CHAT, MessageKind.ASSISTANT) == ["one"]


# -- segments of files ------------------------------------------------------------------------


async def test_file_segments_are_created_from_each_source(
    world: InMemoryRuntime, file_server: FileServer, tmp_path: Path
) -> None:
    encoded = base64.b64encode(PNG).decode()
    local = tmp_path / "local.png"
    local.write_bytes(PNG)
    served = file_server.add("/b", PNG)
    for create, source, remote in (
        ("create_from_bytes", PNG, None),
        ("create_from_base64", encoded, None),
        ("create_from_base64", f"base64://{encoded[:4]}\n{encoded[4:]}", None),
        ("create_from_base64", f"data:image/png;base64,{encoded}", None),
        ("create_from_url", f"data:image/png;base64,{encoded}", None),
        ("create_from_url", served, served),
        ("create_from_local_path", local, None),
        ("create_form_local_path", local, None),
    ):
        for kind, cls in (("image", ChatMessageSegmentImage), ("file", ChatMessageSegmentFile)):
            made = await getattr(cls, create)(source, CHAT, "../a.png")
            assert type(made) is cls
            assert (made.type, made.file_name, made.remote_url) == (kind, "a.png", remote)
            assert made.text == f"[{kind.capitalize()}: a.png]"
            assert Path(made.local_path).parent == world.areas.uploads_dir(CHAT)
            assert Path(made.local_path).read_bytes() == PNG


async def test_a_segment_without_a_name_gets_one_of_its_content(world: InMemoryRuntime) -> None:
    made = await ChatMessageSegmentFile.create_from_bytes(b"x", from_chat_key=CHAT, use_suffix=".txt")
    assert len(made.file_name) == 36 and made.file_name.endswith(".txt")
    url = "data:image/png;base64," + base64.b64encode(b"x").decode()
    assert (await ChatMessageSegmentImage.create_from_url(url, CHAT)).file_name.endswith(".png")
    for broken in ("data:image/png;base64", "data:image/png;base64,%%%", "no base64!"):
        with pytest.raises(InvalidValueError, match=r"data: URL|not valid base64"):
            await ChatMessageSegmentFile.create_from_base64(broken, CHAT)


# -- personas ---------------------------------------------------------------------------------


async def test_a_context_reads_and_changes_the_persona(world: InMemoryRuntime, ctx: AgentCtx) -> None:
    row = await DBPreset.create(name="p", content="c", author="a")
    assert await ctx.get_preset_by_id(-1) is None
    assert (await ctx.get_effective_preset_by_id(-1)).id == -1
    changes = [await ctx.set_preset(chosen) for chosen in (row.id, row.id, -1, None)]
    assert changes == [True, False, True, False]
    with pytest.raises(InvalidValueError, match="there is no preset 999"):
        await ctx.set_preset(999)


# -- embeddings, pictures of people, databases ------------------------------------------------


def vectors(*, dimension: int) -> Any:
    async def answer(writer: Any, request: Any) -> None:
        if request.body["input"] == "refused":
            return await refuse(400, "no")(writer, request)
        vector = [1.0, 0.0] if request.body["input"] == "tea" else [0.6, 0.8]
        data = [{"object": "embedding", "index": 0, "embedding": vector[:dimension]}]
        body = {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 1}}
        return await respond(200, body)(writer, request)

    return answer


async def test_texts_are_embedded_by_the_group_text_embedding(tmp_path: Path) -> None:
    async with ChatServer([vectors(dimension=2)]) as server:
        group = {"CHAT_MODEL": "small", "BASE_URL": server.base_url, "API_KEY": "k"}
        core = CoreConfig(
            MODEL_GROUPS={
                "text-embedding": ModelConfigGroup(**group, EXTRA_BODY=json.dumps({"dimensions": 2})),
                "other": ModelConfigGroup(**group),
            }
        )
        async with InMemoryRuntime(data_dir=tmp_path, core=core):
            assert get_memory_embedding_dimension() == embedding_service.resolved_dimension == 2
            assert await embed_text(" tea ") == [1.0, 0.0]
            assert await embed_batch(["tea", "refused", " ", "milk"]) == [[1.0, 0.0], None, None, [0.6, 0.8]]
            assert await embedding_service.compute_similarity("tea", "milk") == pytest.approx(0.6)
            assert EmbeddingService(model_group="other").resolved_dimension == 1024
            assert len(await EmbeddingService("other", dimension=3).embed_text("tea")) == 2
            asked = [(one.body["model"], one.body["input"], one.body["dimensions"]) for one in server.seen]
            assert asked[0] == ("small", "tea", 2) and asked[-1] == ("small", "tea", 3)


async def test_a_missing_group_for_embeddings_names_its_variable(world: InMemoryRuntime) -> None:
    assert get_memory_embedding_dimension() == 1024
    for ask in (embed_text("tea"), embed_batch(["tea"])):
        with pytest.raises(InvalidValueError, match="NEKRO_MODELS__TEXT_EMBEDDING__MODEL"):
            await ask


async def test_the_avatar_of_a_person_is_downloaded(
    ctx: AgentCtx, file_server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = file_server.add("/g?b=qq&nk=10001&s=640", PNG).replace("10001", "{user_id}")
    monkeypatch.setattr(user, "_AVATAR_URL", address)
    path = await get_avatar("10001", ctx)
    assert path == "/app/uploads/avatar_10001.png" and ctx.fs.get_file(path).read_bytes() == PNG
    with pytest.raises(DownloadError):
        await get_avatar(10002, ctx)
    with pytest.raises(InvalidValueError, match="not a QQ number"):
        await get_avatar("1&nk=2", ctx)


async def test_events_name_their_chat() -> None:
    group = SimpleNamespace(message_type="group", group_id=7, user_id=3)
    private = SimpleNamespace(message_type="private", user_id=3)
    assert await onebot_util.get_chat_info(group) == ("group_7", ChatType.GROUP)
    assert await onebot_util.get_chat_info_old(group) == ("onebot_v11-group_7", ChatType.GROUP)
    assert await onebot_util.get_chat_info_old(private) == ("onebot_v11-private_3", ChatType.PRIVATE)
    with pytest.raises(InvalidValueError, match="of no chat"):
        await onebot_util.get_chat_info_old(SimpleNamespace(message_type="guild"))


def test_plugins_have_a_database_of_their_own(world: InMemoryRuntime) -> None:
    import sqlite3

    address = resolve_db_url()
    file = Path(address.removeprefix("sqlite://"))
    assert file.is_relative_to(world.runtime.data_dir) and resolve_db_url() == address
    with closing(sqlite3.connect(file)) as database:  # a connection of its own does not close itself
        database.execute("CREATE TABLE notes (text TEXT)")
    assert file.parent.stat().st_mode & 0o077 == 0


# -- types ------------------------------------------------------------------------------------


def test_a_plugin_keeps_what_it_registers_in_the_classes_of_the_reference(plugin: NekroPlugin) -> None:
    from nekro_agent.services.plugin.schema import PromptInjectMethod, WebhookMethod

    assert plugin.prompt_inject_method is None

    @plugin.mount_prompt_inject_method("facts", "some facts")
    async def facts(_ctx: AgentCtx) -> str:
        return ""

    @plugin.mount_webhook_method("push", "Push", "on push")
    async def push(_ctx: AgentCtx) -> None: ...

    assert plugin.prompt_inject_method == PromptInjectMethod("facts", "some facts", facts)
    assert plugin.webhook_methods == {"push": WebhookMethod("Push", "on push", push)}


def test_the_runner_of_jobs_needs_no_object(world: InMemoryRuntime) -> None:
    assert TaskAPI.runner() is task and isinstance(task, TaskRunner)
    assert TaskAPI.get_running_tasks() == [] and TaskAPI.get_handle("none", "x") is None
    assert inspect.iscoroutinefunction(TaskAPI.start)
