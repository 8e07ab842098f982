"""The examples of ``docs/plugins.md``, run as written."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from nekro_agent.ports import JobState
from nekro_agent.testing import InMemoryRuntime

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
GREETER, REPORTS, GREETER_TEST = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
MODULES = {"greeter": GREETER, "reports": REPORTS, "documented_case": GREETER_TEST}


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
