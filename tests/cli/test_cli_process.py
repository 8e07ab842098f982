"""Child processes: a failed start is reported with the child's output, and no child outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS

from nekro.cli.services.process import (
    ChildProcess,
    Supervised,
    attach_to_supervisor,
    describe_exit,
    flower_spec,
    worker_spec,
)
from nekro.cli.services.supervisor import RestartPauses
from nekro_agent.errors import ServiceError


class Lines:
    """Records a child's output."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.closed = False

    def write(self, line: str) -> None:
        self.taken.append(line)

    def close(self) -> None:
        self.closed = True


async def test_output_of_a_worker_that_fails_to_start_is_quoted(tmp_path: Path) -> None:
    lines = Lines()
    child = await ChildProcess.start(
        worker_spec("methods", name="methods-1", concurrency=2),
        environment={**os.environ, "NEKRO_BROKER__ULR": "x"},
        directory=tmp_path,
        sink=lines,
    )
    with pytest.raises(ServiceError) as caught:
        await child.ready()
    assert "methods-1 ended with exit code 2 before it was ready" in str(caught.value)
    assert "Did you mean NEKRO_BROKER__URL?" in str(caught.value)
    assert any("NEKRO_BROKER__ULR" in line for line in lines.taken)
    assert lines.closed
    assert child.exit_code == 2
    assert await child.stop(warm_seconds=1) == 2


@pytest.mark.parametrize("seconds", [None, 5.0], ids=["no time limit", "a time limit for all new sockets"])
def test_a_child_reports_ready_and_detects_the_end_of_its_parent(seconds: float | None) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(seconds)  # the parent's limit marks the descriptor that the child inherits
    gone = threading.Event()
    attach_to_supervisor(theirs.detach(), gone.set).ready("methods-1@host")
    assert b'"node": "methods-1@host"' in ours.recv(200)
    assert not gone.wait(0.1)
    ours.close()
    assert gone.wait(WAIT_SECONDS)


@contextlib.asynccontextmanager
async def child_running(program: str) -> AsyncIterator[tuple[ChildProcess, Supervised]]:
    """A child that runs a program, and what reports for it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    child = ChildProcess(worker_spec("methods", name="methods-1"), process, ours)
    try:
        yield child, attach_to_supervisor(theirs.detach(), lambda: None)
    finally:
        await child.stop(warm_seconds=WAIT_SECONDS)


@pytest.mark.parametrize(
    ("program", "reports"), [("while True: pass", False), ("import time; time.sleep(600)", True)]
)
async def test_a_child_that_makes_progress_has_no_time_limit(
    program: str, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.cli.services.process.PROGRESS_SECONDS", 0.3)
    waits: list[str] = []
    async with child_running(program) as (child, supervised):

        def said(text: str) -> None:
            waits.append(text)
            if reports:
                supervised.does(f"importing plugin {len(waits)}")
            if len(waits) == 8:
                supervised.ready("methods-1@host")

        # Eight waits are longer.
        assert await child.ready(on_wait=said, stuck_seconds=2) == "methods-1@host"
    assert re.search(r"waiting for methods-1 for \d+ s: it is starting", waits[0])
    assert len(waits) >= 8
    assert not reports or "it is importing plugin" in waits[-1]


async def test_a_child_that_makes_no_progress_is_given_up_with_what_it_did() -> None:
    async with child_running("import time; time.sleep(600)") as (child, supervised):
        supervised.does("importing weather (/plugins/weather.py)")
        with pytest.raises(ServiceError) as caught:
            await child.ready(stuck_seconds=0.5)
    text = "methods-1 has made no progress for 0.5 s (it was importing weather (/plugins/weather.py))"
    assert str(caught.value) == text


def test_specs_describe_their_command() -> None:
    spec = worker_spec("long", name="long-1", concurrency=3)
    assert spec.arguments == ("worker", "--lane", "long", "--name", "long-1", "--concurrency", "3")
    assert flower_spec(5555).arguments == ("flower", "--port", "5555")


def test_exit_codes_are_described_as_text() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -200)] == [
        "exit code 0",
        "exit code 3",
        "SIGKILL",
        "signal 200",
    ]


def test_restarts_are_delayed_and_the_delay_is_reset_after_a_long_run() -> None:
    backoff = RestartPauses(first_seconds=1, most_seconds=5, good_seconds=60)
    assert [backoff.after(0.1) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert backoff.after(61) == 1
    assert backoff.after(0.1) == 2
