"""The shared clock of one process: which readings it follows and which it ignores."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from broker_config.settings import BrokerSettings, DatabaseSettings
from nekro.broker.broker_figures import read_broker_clock
from nekro.wire.invocation import Invocation
from nekro_agent import shared_clock
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.shared_clock import (
    Reading,
    SharedClock,
    elapsed_seconds,
    read_clock,
    share_time,
    shared_now,
    shared_time,
)
from storage.engine import Database, follow_database_clock, read_database_clock

HOUR = 3600.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SharedClock:
    """A clock of this test that has no readings."""
    clock = SharedClock()
    monkeypatch.setattr(shared_clock, "_clock", clock)
    return clock


def reading(*, theirs_ahead: float, uncertain: float = 0.001) -> Reading:
    """A reading of a clock that is ahead of its host's."""
    now = time.time()
    return Reading(
        theirs_seconds=now + theirs_ahead,
        host_seconds=now,
        elapsed_seconds=elapsed_seconds(),
        uncertain_seconds=uncertain,
    )


def ahead(clock: SharedClock) -> float:
    """Seconds by which a clock is ahead of the host's."""
    return clock.now() - time.time()


def test_without_a_reading_the_host_clock_is_used(
    clock: SharedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    assert clock.now() == 1234.5


@pytest.mark.parametrize("theirs_ahead", [HOUR, -HOUR])
def test_a_differing_reading_is_followed(clock: SharedClock, theirs_ahead: float) -> None:
    clock.take(reading(theirs_ahead=theirs_ahead))
    assert ahead(clock) == pytest.approx(theirs_ahead, abs=1)
    assert shared_now() == pytest.approx(time.time() + theirs_ahead, abs=1)
    assert shared_time() - datetime.now(UTC) == pytest.approx(
        timedelta(seconds=theirs_ahead), abs=timedelta(seconds=1)
    )


def test_a_reading_within_its_uncertainty_changes_nothing(clock: SharedClock) -> None:
    clock.take(reading(theirs_ahead=40, uncertain=50))
    assert ahead(clock) == pytest.approx(0, abs=1)
    clock.take(reading(theirs_ahead=HOUR))
    clock.take(reading(theirs_ahead=HOUR + 40, uncertain=50))
    assert ahead(clock) == pytest.approx(HOUR, abs=1)
    clock.take(reading(theirs_ahead=0))
    assert ahead(clock) == pytest.approx(0, abs=1)


def test_a_step_of_the_hosts_clock_changes_nothing(
    clock: SharedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.take(reading(theirs_ahead=0))
    before = clock.now()
    host_time = time.time
    monkeypatch.setattr(time, "time", lambda: host_time() - HOUR)
    assert clock.now() >= before
    clock.take(reading(theirs_ahead=HOUR))
    assert clock.now() >= before


async def test_the_reading_with_the_shortest_round_trip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 8.0, 10.0, 12.0, 20.0, 26.0])
    monkeypatch.setattr(shared_clock, "elapsed_seconds", lambda: next(ticks))
    answers = iter([104.0, 111.0, 123.0])

    async def ask() -> float:
        return next(answers)

    found = await read_clock(ask, host_clock=lambda: 162.0)
    assert found == Reading(
        theirs_seconds=111.0, host_seconds=161.0, elapsed_seconds=11.0, uncertain_seconds=1.0
    )
    assert found.ahead_seconds == 50.0


def invocation(deadline: datetime, **fields: Any) -> Invocation:
    return Invocation(
        call_id="1", method="a.b.c", chat_key="c", container_key="c", issued_at=shared_time(),
        deadline=deadline, args="", **fields,
    )  # fmt: skip


def test_deadlines_are_compared_with_the_shared_clock() -> None:
    share_time(reading(theirs_ahead=HOUR))
    soon = shared_time() + timedelta(seconds=60)
    assert 50 < invocation(soon).remaining_seconds() <= 60
    assert 50 < invocation(soon + timedelta(seconds=60), waits_until=soon).waited_seconds_left() <= 60
    assert invocation(datetime.now(UTC) + timedelta(seconds=60)).remaining_seconds() < 0


@pytest.fixture
async def postgres(postgres_server: Any, tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(DatabaseSettings(url=postgres_server.create_database()), tmp_path)
    yield database
    await database.dispose()


@pytest.mark.parametrize("host_ahead", [HOUR, -HOUR])
async def test_a_process_follows_postgresql(
    postgres: Database, clock: SharedClock, monkeypatch: pytest.MonkeyPatch, host_ahead: float
) -> None:
    host_time = time.time
    wrong = await read_database_clock(postgres, host_clock=lambda: host_time() + host_ahead)
    assert wrong.ahead_seconds == pytest.approx(host_ahead, abs=2 * wrong.uncertain_seconds + 0.01)
    share_time(wrong)
    assert clock.now() == pytest.approx(host_time(), abs=HOUR / 2)
    monkeypatch.setattr(time, "time", lambda: host_time() + host_ahead)
    assert clock.now() == pytest.approx(host_time(), abs=HOUR / 2)


async def test_a_database_that_does_not_answer_leaves_the_clock_unchanged(
    clock: SharedClock, tmp_path: Path
) -> None:
    clock.take(reading(theirs_ahead=HOUR))
    database = Database(DatabaseSettings(url="postgresql://u@127.0.0.1:1/x"), tmp_path)
    with pytest.raises(StorageUnavailableError):
        await follow_database_clock(database)
    await database.dispose()
    assert ahead(clock) == pytest.approx(HOUR, abs=1)


async def test_on_sqlite_the_host_clock_is_used(
    clock: SharedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(DatabaseSettings(), tmp_path)
    assert await follow_database_clock(database) is None
    await database.dispose()
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    assert clock.now() == 1234.5


async def test_with_rabbitmq_the_database_clock_is_followed(postgres: Database, clock: SharedClock) -> None:
    assert await read_broker_clock(BrokerSettings(url="amqp://guest@127.0.0.1:1//")) is None
    clock.take(reading(theirs_ahead=HOUR))
    assert await follow_database_clock(postgres) is not None
    assert ahead(clock) == pytest.approx(0, abs=1)
