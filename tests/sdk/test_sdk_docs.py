"""The examples of ``docs/plugins.md``, run as written."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.ports import JobState, MessageKind
from nekro_agent.testing import InMemoryRuntime

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
GREETER, REPORTS, SEATS, GREETER_TEST = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
MODULES = {"greeter": GREETER, "reports": REPORTS, "seats": SEATS, "documented_case": GREETER_TEST}


@pytest.fixture(autouse=True)
def _documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the examples importable."""
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


async def test_the_documented_plugin_passes_its_documented_test(tmp_path: Path) -> None:
    case = importlib.import_module("documented_case")
    await case.test_greeting(tmp_path / "data")


async def test_the_documented_job_reports_its_progress_and_sends_a_file(tmp_path: Path) -> None:
    plugin = importlib.import_module("reports").plugin
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data") as world:
        outcome = await world.call("begin_report", "may", 3, chat_key="group_1")
        assert outcome.value == "report may has begun"
        await eventually(lambda: not world.jobs.running(), what="the end of the job")
        job = world.jobs.peek(plugin.key, "report", "may")
        assert job is not None
        assert (job.state, job.message, job.percent) == (JobState.SUCCEEDED, "3 pages", 100)
        assert world.messages.sent[0].file_path is not None


async def test_the_documented_booking_is_made_once_per_call(tmp_path: Path) -> None:
    plugin = importlib.import_module("seats").plugin
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data") as world:
        first = [(await world.call("book", "Ada", call_id="one")).value for _ in range(2)]
        other = (await world.call("book", "Ada", call_id="two")).value
        assert (first, other) == ([1, 1], 2)


async def test_the_testing_runtime_repeats_a_call_by_its_id(tmp_path: Path) -> None:
    plugin = NekroPlugin("Says", "says", "", "1", "ada", "")

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "say", "")
    async def say(_ctx: AgentCtx) -> None:
        for _ in range(2):
            await _ctx.send_text("hello")
        await _ctx.push_system("noted")

    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data") as world:
        for call_id in ("one", "one", None, None):
            await world.call("say", call_id=call_id)
        assert [message.text for message in world.messages.sent] == ["hello"] * 6
        assert world.messages.texts("test-chat", MessageKind.SYSTEM) == ["noted"] * 3
