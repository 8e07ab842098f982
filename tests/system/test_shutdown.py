"""A worker that is told to stop ends, whatever a plugin left running in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from worker_fleet import Fleet

STUCK = Path(__file__).parent / "stuck_plugins"
#: Workers with their own variables are not forked: the test is about the end of an interpreter.
OWN_INTERPRETER = {"PYTHONUNBUFFERED": "1"}
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """With short time limits for calls and cleanup hooks."""
    workers = {"drain_seconds": 1, "cleanup_seconds": 1}
    return make_fleet(plugins={"dirs": (STUCK,)}, workers=workers)


def call(fleet: Fleet, method: str) -> None:
    """Call a method of the plugin."""
    ran = fleet.run("call", method)
    assert ran.returncode == 0, ran.stderr


def test_a_thread_that_never_ends_does_not_block_the_shutdown(fleet: Fleet) -> None:
    (worker,) = fleet.start("methods", variables=OWN_INTERPRETER)
    call(fleet, "leave_thread")
    assert worker.stop() == 0
    log = worker.log.read_text()
    assert "shutdown_cut_short" in log
    assert "_0: threading.py" in log, "the log names the thread"


def test_a_cleanup_hook_that_blocks_the_loop_shortens_the_shutdown(fleet: Fleet) -> None:
    (worker,) = fleet.start("methods", variables=OWN_INTERPRETER)
    call(fleet, "block_cleanup")
    assert worker.stop() == 1
    assert "shutdown_cut_short" in worker.log.read_text()
