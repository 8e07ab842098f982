"""Handlers of nonebot's ``on_command`` are commands of their plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loaded_plugins import unload_plugins

from nekro.plugins.loader import LoadedPlugins, PluginStatus, load_plugins
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission, CommandResponse
from nekro_agent.testing import InMemoryRuntime

CODE = '''
from typing import Optional, Union

from nonebot import on_command
from nonebot.adapters.onebot.v11 import Bot, GroupMessageEvent, Message, MessageEvent, PrivateMessageEvent
from nonebot.exception import FinishedException
from nonebot.matcher import Matcher
from nonebot.params import CommandArg
from nonebot.permission import SUPERUSER

from nekro_agent.adapters.onebot_v11.matchers.command import command_guard, finish_with
from nekro_agent.adapters.onebot_v11.tools.onebot_util import get_chat_info_old
from nekro_agent.api.plugin import NekroPlugin

plugin = NekroPlugin("n", "diary", "d", "1", "Ada", "u")
seen = set()


@on_command("diary", aliases={"日记"}, priority=5, block=True).handle()
async def _(matcher: Matcher, event: MessageEvent, bot: Bot, arg: Message = CommandArg()):
    """Write."""
    username, content, chat_key, chat_type = await command_guard(event, bot, arg, matcher)
    await finish_with(matcher, message=f"{username}: {content} in {chat_key} ({chat_type.value})")
    raise RuntimeError("not reached")


echo = on_command("echo")


@echo.handle()
async def say(event: GroupMessageEvent, args: Message = CommandArg()):
    await echo.send(f"{event.get_user_id()} {event.user_id!r} {event.group_id} {event.get_plaintext()!r}")
    try:
        await echo.finish(args.extract_plain_text())
    except FinishedException:
        await echo.send("finishing")
        raise


@on_command("parts").handle()
async def parts(matcher: Matcher, event: MessageEvent, arg: Message = CommandArg()):
    texts = "".join(segment.data.get("text", "") for segment in arg if segment.type == "text").split()
    people = [segment.data["qq"] for segment in event.message if segment.type == "at"]
    await matcher.finish(f"{texts} {people} {str(arg)!r} {len(list(event.original_message))}")


@on_command("about").handle()
async def about(event: Union[MessageEvent, GroupMessageEvent], matcher: Optional[Matcher] = None):
    if event.message_id in seen:
        await matcher.finish("a repeat")
    seen.add(event.message_id)
    chat_key, chat_type = await get_chat_info_old(event)
    facts = [chat_key, chat_type.value, event.get_session_id(), event.get_type(), event.is_tome()]
    facts.append(event.reply)
    kinds = [isinstance(event, GroupMessageEvent), isinstance(event, PrivateMessageEvent)]
    await matcher.finish(Message(f"{facts} {kinds} {event.time > 0} {type(event.message_id).__name__}"))


@on_command("uses_bot", permission=SUPERUSER).handle()
async def use(bot: Bot, event):
    await bot.send(event, "hi")


@on_command("fails").handle()
def fail():
    raise ValueError("no")


@on_command("ruled", rule=lambda: True).handle()
async def ruled(event: MessageEvent):
    """Its rule is not applied here."""


@on_command("asks").got("name", prompt="?")
async def asks(matcher: Matcher):
    """Questions are not asked here."""


@on_command("stateful").handle()
async def stateful(state: dict):
    """The state does not exist here."""
'''


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPlugins:
    (tmp_path / "diary.py").write_text(CODE)
    return load_plugins(
        [tmp_path / "diary.py"], shipped=False, entry_points=False, data_dir=tmp_path / "data"
    )


@pytest.fixture
async def world(loaded: LoadedPlugins, tmp_path: Path) -> AsyncIterator[InMemoryRuntime]:
    async with InMemoryRuntime(*loaded.plugins, data_dir=tmp_path / "data") as runtime:
        yield runtime
    unload_plugins(loaded)


def who(*, is_super: bool = False, chat_key: str = "onebot_v11-group_77") -> CommandExecutionContext:
    return CommandExecutionContext(user_id="42", username="Ada", chat_key=chat_key, is_super_user=is_super)


async def answer(world: InMemoryRuntime, line: str, **options: object) -> CommandResponse:
    return [response async for response in world.command(line, who(**options))][-1]  # type: ignore[arg-type]


async def test_a_handler_runs_as_a_command_and_its_text_is_the_answer(world: InMemoryRuntime) -> None:
    written = await answer(world, "/diary rain all day", is_super=True)
    assert (written.status.value, written.message) == (
        "success", "Ada: rain all day in onebot_v11-group_77 (group)",
    )  # fmt: skip
    assert (await answer(world, "/日记 sun", is_super=True)).message.startswith("Ada: sun in ")
    said = await answer(world, "/echo two  words")
    assert said.message == "42 42 77 'two  words'\ntwo  words\nfinishing"


async def test_a_handler_reads_the_segments_of_its_text(world: InMemoryRuntime) -> None:
    line = "/parts tell [@id:77;nickname:Bo B@] and [@88@] now"
    response = await answer(world, line)
    assert response.message == f"['tell', 'and', 'now'] ['77', '88'] {line.removeprefix('/parts ')!r} 5"
    assert (await answer(world, "/parts plain")).message == "['plain'] [] 'plain' 1"
    assert (await answer(world, "/parts")).message == "[] [] '' 0"


async def test_a_handler_reads_the_properties_of_its_event(world: InMemoryRuntime) -> None:
    group = await answer(world, "/about")
    assert group.message == (
        "['onebot_v11-group_77', 'group', 'group_77_42', 'message', True, None] [True, False] True int"
    )
    private = await answer(world, "/about", chat_key="onebot_v11-private_42")
    assert private.message == (
        "['onebot_v11-private_42', 'private', '42', 'message', True, None] [False, True] True int"
    )
    lines = [
        [one async for one in world.command("/about", who().model_copy(update={"message_id": "call-1"}))][-1]
        for _ in range(2)
    ]
    assert lines[0].message == group.message and lines[1].message == "a repeat"


async def test_permissions_and_kinds_of_chats_apply(world: InMemoryRuntime, loaded: LoadedPlugins) -> None:
    assert "needs the permission super_user" in (await answer(world, "/diary x")).message
    assert "needs the permission super_user" in (await answer(world, "/uses_bot")).message
    private = await answer(world, "/echo x", chat_key="onebot_v11-private_42")
    assert (private.status.value, private.message) == ("error", "this command is for group chats")
    levels = {command.name: command.permission for command in loaded.plugins[0].commands}
    assert levels == {
        "diary": CommandPermission.PUBLIC,
        "echo": CommandPermission.PUBLIC,
        "parts": CommandPermission.PUBLIC,
        "about": CommandPermission.PUBLIC,
        "uses_bot": CommandPermission.SUPER_USER,
        "fails": CommandPermission.PUBLIC,
    }


async def test_what_does_not_exist_here_fails_precisely(world: InMemoryRuntime) -> None:
    used = await answer(world, "/uses_bot", is_super=True)
    assert "nonebot.adapters.onebot.v11.Bot does not exist in this system" in used.message
    assert (await answer(world, "/fails")).message == "ValueError: no"


def test_registrations_of_another_meaning_are_listed(loaded: LoadedPlugins) -> None:
    (record,) = loaded.records
    assert record.status is PluginStatus.DEGRADED
    without_effect = [name for name in record.placeholders if "has no effect" in name]
    assert [name.partition(" (")[0] for name in without_effect] == [
        "nonebot.on_command('asks').got('name') has no effect on asks",
        "nonebot.on_command('ruled').handle(…) has no effect on ruled",
        "nonebot.on_command('stateful').handle(…) has no effect on stateful",
    ]
    assert [name for name in record.placeholders if "has no effect" not in name] == [
        "nonebot.adapters.onebot.v11.Bot"
    ]
    unload_plugins(loaded)
