"""A method that blocks its event loop for ever: its process ends, and its other calls are answered."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually
from worker_fleet import plugin_of

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.cli.environment import environment_of
from nekro_agent.errors import CallTimeoutError, OutcomeUnknownError


@pytest.fixture
def fleet(make_fleet: Callable[..., Any]) -> Any:
    return make_fleet(
        broker={"visibility_timeout_seconds": 3},
        agent={"lease_seconds": 2},
    )


@pytest.fixture
def up(fleet: Any, tmp_path: Path) -> Iterator[Path]:
    """A `nekro up` with one worker; its log."""
    log = tmp_path / "up.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "nekro.cli.main",
                "up",
                "--methods",
                "1",
                "--long",
                "0",
                "--rounds",
                "0",
            ],
            env=environment_of(fleet.settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


async def logged(log: Path, words: str) -> None:
    await eventually(lambda: words in log.read_text(), what=lambda: f"{words!r}\n{log.read_text()[-4000:]}")


@pytest.mark.slow
async def test_a_process_with_a_blocked_loop_ends_and_its_other_calls_are_answered(
    up: Path, services: Services
) -> None:
    plugin = plugin_of(services, "tests.hauler")
    journal = plugin.get_plugin_data_dir() / "journal.txt"

    def invoke(name: str, *args: Any, seconds: float = WAIT_SECONDS) -> asyncio.Task[Any]:
        call = use_cases.invoke(
            services, name, args, {}, chat_key="lost", user_id=None, timeout_seconds=seconds
        )
        return asyncio.create_task(call)

    await logged(up, "ready: ")
    counting, carrying = invoke("count_beside", "x"), invoke("carry_beside", "x")
    await eventually(
        lambda: journal.exists() and len(journal.read_text().splitlines()) >= 2, what="both calls"
    )
    hanging = invoke("hang", seconds=1)
    await logged(up, "ended with exit code 70")
    assert "event_loop_lost" in up.read_text()
    await plugin.store.set(store_key="go x", value="1")

    with pytest.raises(CallTimeoutError):
        await hanging
    # A TOOL call runs again in the restarted process; a call with an effect does not.
    pid = json.loads((await counting).value_bytes())
    with pytest.raises(OutcomeUnknownError):
        await carrying
    await logged(up, f"restarted (process {pid})")
    ran = [tuple(line.split()) for line in journal.read_text().splitlines()]
    (lost,) = [process for method, process in (run for run in ran if len(run) == 2) if method == "hang"]
    assert set(ran) == {
        ("count", "x", lost),
        ("carry", "x", lost),
        ("hang", lost),
        ("count", "x", str(pid)),
    }
