"""Probes of a worker that starts, hangs, loses its database or stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings
from nekro.base.loop_thread import LoopThread
from storage.engine import Database
from storage.migrate import upgrade
from workers.ops.monitor import Health


@pytest.fixture
def home() -> Iterator[LoopThread]:
    thread = LoopThread("test-home")
    thread.start()
    yield thread
    thread.stop()


def health_of(path: Path, *, loop_seconds: float = 5) -> Health:
    settings = DatabaseSettings(url=f"sqlite:///{path}")
    return Health(
        lane="methods", worker="m@h", database=Database(settings, path.parent), loop_seconds=loop_seconds
    )


def migrate(path: Path) -> None:
    asyncio.run(upgrade(DatabaseSettings(url=f"sqlite:///{path}"), path.parent))


def test_a_starting_worker_is_live_and_not_ready(tmp_path: Path) -> None:
    health = health_of(tmp_path / "a.db")
    assert health.live().ok
    assert health.ready().faults == ("the worker is starting",)


def test_a_started_worker_is_ready_until_it_stops_consuming(tmp_path: Path, home: LoopThread) -> None:
    migrate(tmp_path / "a.db")
    health, fault = health_of(tmp_path / "a.db"), [None, "the worker is stopping"]
    health.started(home.loop, consumes=lambda: fault.pop(0))
    assert health.ready().ok
    assert health.ready().faults == ("the worker is stopping",)
    assert health.live().ok
    asyncio.run_coroutine_threadsafe(health._database.dispose(), home.loop).result(WAIT_SECONDS)


def test_a_worker_with_a_blocked_loop_is_not_live(tmp_path: Path, home: LoopThread) -> None:
    health = health_of(tmp_path / "a.db", loop_seconds=0.05)
    health.started(home.loop, consumes=lambda: None)
    release = threading.Event()

    def block() -> None:
        release.wait(10)

    home.call(block)
    try:
        assert health.live().faults == ("the event loop has not turned for 0.05 s",)
        assert health.ready().faults == ("the event loop has not turned for 0.05 s",)
    finally:
        release.set()


def test_a_worker_without_its_database_is_live_and_not_ready(tmp_path: Path, home: LoopThread) -> None:
    health = health_of(tmp_path / "missing" / "a.db")
    (tmp_path / "missing").write_text("no directory")
    health.started(home.loop, consumes=lambda: None)
    assert health.live().ok
    (fault,) = health.ready().faults
    assert fault.startswith("the database does not answer")
