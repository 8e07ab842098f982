"""The log of what plugins raise: an error each time, but once for a name that does not exist here."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nekro.agent.model import PluginBrief
from nekro.agent.prompt import collect_injected
from nekro_agent.commands.schemas import CommandExecutionContext
from nekro_agent.core.logger import logger
from nekro_agent.errors import PlaceholderUsedError
from nekro_agent.placeholders import Placeholder
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime

ROUNDS = 3


@pytest.fixture
def records() -> Iterator[list[tuple[str, str, bool]]]:
    """Event, level, and whether there is a traceback."""
    found: list[tuple[str, str, bool]] = []

    def keep(message: Any) -> None:
        record = message.record
        found.append((record["message"], record["level"].name, record["exception"] is not None))

    sink = logger.add(keep, level="WARNING")
    yield found
    logger.remove(sink)


@pytest.fixture
def missing() -> Placeholder:
    """A name that no other test uses, because its use is logged once in a process."""
    return Placeholder(f"nekro_agent.services.missing_{uuid.uuid4().hex}")


def translated(missing: Placeholder) -> None:
    try:
        missing()
    except PlaceholderUsedError as exc:
        raise RuntimeError("the service does not work") from exc


@pytest.mark.parametrize("use", [lambda missing: missing(), translated], ids=["as_is", "translated"])
async def test_a_missing_name_in_a_hook_is_one_warning_and_other_errors_are_errors(
    tmp_path: Path,
    records: list[tuple[str, str, bool]],
    missing: Placeholder,
    use: Callable[[Placeholder], None],
) -> None:
    plugin = NekroPlugin("p", "p", "", "1", "Ada", "")

    @plugin.mount_on_system_message()
    async def seen(_ctx: AgentCtx, text: str) -> None:
        if text == "broken":
            raise ValueError("broken")
        use(missing)

    async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
        for _ in range(ROUNDS):
            await world.host.system_message(world.context(), "note")
        await world.host.system_message(world.context(), "broken")
        await world.host.system_message(world.context(), "broken")
    assert records == [
        ("plugin_hook_failed", "WARNING", False),
        *[("plugin_hook_failed", "ERROR", True)] * 2,
    ]


async def test_a_missing_name_in_a_command_is_one_warning_and_each_answer_names_it(
    tmp_path: Path, records: list[tuple[str, str, bool]], missing: Placeholder
) -> None:
    plugin = NekroPlugin("p", "p", "", "1", "Ada", "")

    @plugin.mount_command("use", "Uses it")
    async def use(context: CommandExecutionContext) -> None:
        missing()

    async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
        answers = [[one async for one in world.command("/use")][-1].message for _ in range(ROUNDS)]
    assert all("PlaceholderUsedError: nekro_agent.services.missing_" in answer for answer in answers)
    assert records == [("command_failed", "WARNING", False)]


async def test_a_missing_name_is_in_no_prompt_and_other_errors_are(
    records: list[tuple[str, str, bool]], missing: Placeholder
) -> None:
    async def use() -> str:
        return str(missing())

    async def fail() -> str:
        raise ValueError("broken")

    def brief(key: str, inject: Callable[[], Awaitable[str]]) -> PluginBrief:
        return PluginBrief(key=key, name=key, module_name=key, methods=(), inject=inject)

    for _ in range(ROUNDS):
        first, second = await collect_injected([brief("a.a", use), brief("a.b", fail)], redact=str)
        assert (first.text, first.error) == ("", None)
        assert second.error == "ValueError: broken"
    assert records.count(("inject_failed", "WARNING", False)) == 1
    assert records.count(("inject_failed", "WARNING", True)) == ROUNDS
