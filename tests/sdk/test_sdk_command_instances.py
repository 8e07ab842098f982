"""Commands that are objects: subclasses of BaseCommand, and objects with __call__."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loaded_plugins import unload_plugins

from nekro.plugins.loader import LoadedPlugins, load_plugins
from nekro_agent.commands.registration import CommandRegistry
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission
from nekro_agent.errors import InvalidValueError
from nekro_agent.testing import InMemoryRuntime

CODE = '''
from typing import Annotated

from nekro_agent.api.plugin import Arg, CmdCtl, NekroPlugin
from nekro_agent.services.command.base import BaseCommand, CommandMetadata, CommandPermission
from nekro_agent.services.command.i18n_helper import t
from nekro_agent.services.command.registry import command_registry

plugin = NekroPlugin("n", "objects", "d", "1", "Ada", "u")


class Add(BaseCommand):
    @property
    def metadata(self) -> CommandMetadata:
        return CommandMetadata(
            name="add", aliases=["plus"], description="Add.", usage="add 1 2",
            permission=CommandPermission.USER, category="sums", tags=["sum"],
        )

    async def execute(
        self,
        context,
        first: Annotated[int, Arg("first", positional=True)],
        second: Annotated[int, Arg("second", positional=True)] = 1,
    ):
        return CmdCtl.success(t(context.lang, zh_CN=f"和 {first + second}", en_US=f"sum {first + second}"))


class Count(BaseCommand):
    def __init__(self, prefix):
        self.prefix = prefix

    @property
    def metadata(self) -> CommandMetadata:
        return CommandMetadata(name="count", description="Count.")

    async def check_permission(self, context):
        return context.username != "Eve", "not you"

    async def execute(self, context, up_to: int = 2):
        for number in range(up_to):
            yield CmdCtl.message(f"{self.prefix}{number}")
        yield CmdCtl.success("end")


class Late(BaseCommand):
    @property
    def metadata(self) -> CommandMetadata:
        return CommandMetadata(name="late", description="Registered in the init.", internal=True)

    async def execute(self, context):
        return "late"


class Doubler:
    """Called like a function."""

    async def __call__(self, context, number: int):
        return number * 2


command_registry.register(Add())
command_registry.register(Count("#"))
plugin.mount_command("double", "Doubles.")(Doubler())


@plugin.mount_init_method()
async def start():
    command_registry.register(Late())
'''


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPlugins:
    (tmp_path / "objects.py").write_text(CODE)
    return load_plugins([tmp_path / "objects.py"], shipped=False, entry_points=False, data_dir=tmp_path)


@pytest.fixture
async def world(loaded: LoadedPlugins, tmp_path: Path) -> AsyncIterator[InMemoryRuntime]:
    async with InMemoryRuntime(*loaded.plugins, data_dir=tmp_path / "data") as runtime:
        yield runtime
    unload_plugins(loaded)


async def answers(world: InMemoryRuntime, line: str, username: str = "Ada") -> list[str]:
    who = CommandExecutionContext(user_id="4", username=username, chat_key="c")
    return [f"{one.status.value}: {one.message}" async for one in world.command(line, who)]


async def test_objects_run_as_commands_of_the_plugin_that_registers_them(world: InMemoryRuntime) -> None:
    assert await answers(world, "/add 2 3") == await answers(world, "/plus first:2 second:3")
    assert await answers(world, "/Ada.objects:add 2") == ["success: 和 3"]
    assert await answers(world, "/add two") == [
        "error: first: 'two': Input should be a valid integer, unable to parse string as an integer"
    ]
    assert await answers(world, "/count 2") == ["processing: #0", "processing: #1", "success: end"]
    assert await answers(world, "/count", username="Eve") == ["error: not you"]
    assert await answers(world, "/double 21") == ["success: 42"]


async def test_an_object_that_the_init_registers_is_a_command_too(
    world: InMemoryRuntime, loaded: LoadedPlugins
) -> None:
    assert await answers(world, "/late") == ["success: late"]
    (plugin,) = loaded.plugins
    await world.host.stop_plugin(plugin)
    await world.host.start_plugin(plugin)  # as when an operator enables it again
    assert sorted(command.name for command in plugin.commands) == ["add", "count", "double", "late"]
    described = {command.name: command for command in plugin.commands}["add"]
    assert (described.permission, described.usage, described.category, described.tags) == (
        CommandPermission.USER, "add 1 2", "sums", ("sum",),
    )  # fmt: skip


def test_only_objects_of_the_class_are_registered() -> None:
    with pytest.raises(InvalidValueError, match="needs an object of a subclass of BaseCommand"):
        CommandRegistry().register("add")  # type: ignore[arg-type]
