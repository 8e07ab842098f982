"""A worker that shall stop ends, whatever a plugin left running in it and however often it is signalled."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

pytestmark = pytest.mark.extended

STUCK = Path(__file__).parent / "stuck_plugins"
#: Workers with their own variables are not forked: the test is about the end of an interpreter.
OWN_INTERPRETER = {"PYTHONUNBUFFERED": "1"}
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
#: Sends itself a signal at the moment in which Celery's handler of another one holds its lock.
INTERRUPTED = """
import os, signal
from types import SimpleNamespace
from celery import signals
from celery.apps.worker import install_worker_term_handler
from nekro.broker.celery.worker import is_stopping
from workers.process import ShutdownLimit
ShutdownLimit(warm_seconds=3600, cold_seconds=3600)
install_worker_term_handler(SimpleNamespace(hostname="w"))
with signals.worker_shutting_down.lock:
    os.kill(os.getpid(), signal.SIGTERM)
print(is_stopping())
"""


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """With short time limits for calls and cleanup hooks."""
    workers = {"drain_seconds": 1, "cleanup_seconds": 1}
    return make_fleet(plugins={"dirs": (STUCK,)}, workers=workers)


def call(fleet: Fleet, method: str) -> None:
    """Call a method of the plugin."""
    ran = fleet.run("call", method)
    assert ran.returncode == 0, ran.stderr


@on_sqlite
def test_a_thread_that_never_ends_does_not_block_the_shutdown(fleet: Fleet) -> None:
    (worker,) = fleet.start("methods", variables=OWN_INTERPRETER)
    call(fleet, "leave_thread")
    assert worker.stop() == 0
    log = worker.log.read_text()
    assert "shutdown_cut_short" in log
    assert re.search(r": stuck\.py:\d+ in sleep_forever", log), "the log names the thread and where it is"


@on_sqlite
def test_a_cleanup_hook_that_blocks_the_loop_shortens_the_shutdown(fleet: Fleet) -> None:
    (worker,) = fleet.start("methods", variables=OWN_INTERPRETER)
    call(fleet, "block_cleanup")
    assert worker.stop() == 1
    assert "shutdown_cut_short" in worker.log.read_text()


def test_a_stop_signal_may_interrupt_the_handler_of_another() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ran.stdout.split()[-1] == "True", ran.stderr
