"""Programs survive their workers: the same output, no further request to the model, no effect twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from fleet_probes import ask
from redis_process import RedisServer
from scene_model import SceneModel
from surviving_programs import SAY, Fault, Survivors, descendants, effects
from waiting import eventually
from worker_fleet import Fleet, Worker, build_fleet

from nekro.sandbox.models import StopType
from storage.engine import Database

HERE = Path(__file__).parent
#: Interruptions of programs in the long test.
PROGRAMS = int(os.environ.get("NEKRO_TEST_PROGRAMS", "200"))
#: Programs that run at once: each end of a worker interrupts all of them at other points.
AT_ONCE = 8
#: Programs of the long test of those that wait.
PARKED = int(os.environ.get("NEKRO_TEST_PARKED", "1000"))
MOST_CALLS = 1000
LARGE = """
import os, time
lots = [tick(f"{{_ck}} {{number}} " + "x" * 5000) for number in range({count})]
while not os.path.exists("/app/shared/go"): time.sleep(0.02)
print(sum(map(len, lots)), tick(f"{{_ck}} is one too many") if {count} == 1000 else "")
"""
#: Two of its calls wait for approval.
ASKS = """
frame = [tick(f"{_ck} {number}") for number in range(5)]
print(keep(f"{_ck} kept"))
receipt = pay(_ck, amount=3)
print(frame, receipt, tick(f"{_ck} paid"))
print(announce(_ck), keep(f"{_ck} told"))
"""


@pytest.fixture
def model() -> Iterator[SceneModel]:
    model = SceneModel()
    yield model
    model.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
def fleet(
    request: pytest.FixtureRequest,
    own_redis: Any,
    model: SceneModel,
    tmp_path: Path,
    new_database: Callable[[str, Path], str],
) -> Iterator[Fleet]:
    fleet = build_fleet(
        tmp_path,
        own_redis.url,
        new_database(request.param, tmp_path),
        is_migrated=False,
        plugins={"dirs": (HERE / "plugins", HERE / "approval_plugins")},
        llm={"base_url": model.start(), "model": "tests-1", "stream": False},
        agent={"lease_seconds": 2},
        sandbox={"max_concurrent": AT_ONCE, "max_calls": MOST_CALLS},
        workers={"drain_seconds": 0.2},
    )
    fleet.start("methods", "methods", "rounds")
    yield fleet
    fleet.stop()


@contextlib.asynccontextmanager
async def opened(fleet: Fleet, model: SceneModel, **values: Any) -> AsyncIterator[Survivors]:
    services = fleet.services()
    await services.start()
    try:
        yield Survivors(fleet, model, services, **values)
    finally:
        await services.close()


def killed(worker: Worker) -> None:
    worker.kill()


def stopped(worker: Worker) -> None:
    assert worker.stop() == 0


@pytest.mark.parametrize("end", [killed, pytest.param(stopped, marks=pytest.mark.extended)])
async def test_programs_go_on_after_their_worker_ended(fleet: Fleet, model: SceneModel, end: Fault) -> None:
    async with opened(fleet, model) as survivors:
        await survivors.play(1)
        # Where little else runs, the worker that ends may have no program, or complete it.
        while not survivors.interruptions:
            await survivors.play(3, ("rounds", end, random.uniform(0, 0.9)))


@pytest.mark.extended
async def test_programs_go_on_after_a_worker_of_their_methods_died(fleet: Fleet, model: SceneModel) -> None:
    async with opened(fleet, model, tools_repeat=True) as survivors:
        await survivors.play(3, ("methods", killed, random.uniform(0, 0.9)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_programs_go_on_after_each_of_many_deaths(
    fleet: Fleet, model: SceneModel, record_property: Callable[..., None]
) -> None:
    seed = int(os.environ.get("NEKRO_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    random.seed(seed)
    print(f"seed {seed}")
    async with opened(fleet, model) as survivors:
        begin, kills = time.monotonic(), 0
        while survivors.interruptions < PROGRAMS:
            end = random.choice((killed, killed, stopped))
            points = sorted(random.random() for _ in range(random.choice((1, 2))))
            await survivors.play(AT_ONCE, *(("rounds", end, point) for point in points))
            kills += len(points)
        figures = {
            "seed": seed, "ends of workers": kills, "programs": survivors.interrupted.total(),
            "by attempts": dict(sorted(survivors.interrupted.items())),
            "interruptions": survivors.interruptions, "seconds": round(time.monotonic() - begin, 1),
        }  # fmt: skip
    print(figures)
    for name, value in figures.items():
        record_property(name, value)


async def pending(survivors: Survivors, method: str, count: int = 1) -> list[str]:
    """Wait until so many calls of a method wait for approval; returns the requests."""

    async def look() -> list[str]:
        rows = await ask(
            survivors.services.database,
            "SELECT id FROM approvals WHERE state = 'pending' AND method = :method",
            method=f"tests.till.{method}",
        )
        return [row[0] for row in rows] if len(rows) == count else []

    what = survivors.fleet.waiting_for(f"{count} requests")
    found: list[str] = await eventually(look, what=what, seconds=3000)
    return found


async def approve(survivors: Survivors, *approval_ids: str) -> None:
    for approval_id in approval_ids:
        await survivors.services.approval_decisions.approve(approval_id, by="shell:root")


async def test_parked_programs_go_on_after_everything_was_lost_but_the_database(
    fleet: Fleet, model: SceneModel, own_redis: RedisServer
) -> None:
    async with opened(fleet, model) as survivors:
        await survivors.say("parked", ASKS)
        (first,) = await survivors.rounds("parked")
        assert first.stop_type == StopType.APPROVAL
        with redis.Redis.from_url(own_redis.url) as client:
            client.flushall()
        await approve(survivors, *await pending(survivors, "pay"))
        _, second = await survivors.rounds("parked", count=2)
        assert second.stop_type == StopType.APPROVAL
        await asyncio.to_thread(fleet.stop)
        own_redis.kill()
    own_redis.start()
    async with opened(fleet, model) as survivors:
        await approve(survivors, *await pending(survivors, "announce"))
        fleet.start("methods", "rounds")
        *_, third = await survivors.rounds("parked", count=3)
    assert third.output == output_of("parked")
    assert model.asked["parked"] == 1
    assert sorted(effects(fleet)) == sorted(
        ["heard scene:parked", "keep parked kept", "keep parked told", "tick parked paid"]
        + [f"tick parked {number}" for number in range(5)]
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_many_programs_wait_without_a_process(
    fleet: Fleet, model: SceneModel, record_property: Callable[..., None]
) -> None:
    chats = [f"w{number}" for number in range(PARKED)]
    (worker,) = [one for one in fleet.workers if one.lane == "rounds"]
    async with opened(fleet, model) as survivors:
        database = survivors.services.database
        await survivors.say("warm", 'print("warm")')
        await survivors.rounds("warm")
        before, begin = (resident(worker.pid), len(descendants(worker.pid))), time.monotonic()
        for chat_key in chats:
            await survivors.say(chat_key, ASKS)
        requests = await pending(survivors, "pay", PARKED)
        await eventually(lambda: no_open_round(database), what="the ends of the rounds")
        waiting, asked_at = (resident(worker.pid), len(descendants(worker.pid))), time.monotonic()
        rows = await ask(
            database,
            "SELECT length(CAST(answers AS TEXT)) + length(CAST(notes AS TEXT)) FROM parked_programs",
        )
        await approve(survivors, *requests)
        decided_at = time.monotonic()
        again = await pending(survivors, "announce", PARKED)
        await approve(survivors, *again)
        for chat_key in chats:
            *_, last = await survivors.rounds(chat_key, count=3)
            assert last.output == output_of(chat_key)
            assert model.asked[chat_key] == 1
        assert survivors.repeated() == {}
    figures = {
        "programs": PARKED, "rows": len(rows), "bytes of a row": round(sum(n for (n,) in rows) / len(rows)),
        "processes": (before[1], waiting[1]), "megabytes": (before[0] >> 20, waiting[0] >> 20),
        "seconds to park": round(asked_at - begin, 1), "to decide": round(decided_at - asked_at, 1),
        "to go on twice": round(time.monotonic() - decided_at, 1),
    }  # fmt: skip
    print(figures)
    for name, value in figures.items():
        record_property(name, value)


@pytest.mark.slow
async def test_storage_grows_with_the_answers_and_no_limit_is_hit_silently(
    fleet: Fleet, model: SceneModel, own_redis: RedisServer, record_property: Callable[..., None]
) -> None:
    used: dict[int, float] = {}
    async with opened(fleet, model) as survivors:
        for count in (MOST_CALLS // 4, MOST_CALLS):
            chat_key = f"large{count}"
            with redis.Redis.from_url(own_redis.url) as client:
                before = stored(client)
                await survivors.say(chat_key, LARGE.format(count=count), SAY)
                await eventually(partial(was_made, fleet, f"tick {chat_key} {count - 1} "))
                used[count] = (stored(client) - before) / count
            await survivors.disturb("rounds", killed)
            (await survivors.shared_dir(chat_key) / "go").touch()
            first = (await survivors.rounds(chat_key))[0]
            assert first.attempt == 2 and survivors.repeated() == {}
            assert model.asked[chat_key] == 1
            if count == MOST_CALLS:
                assert "refused further calls after 1000" in (first.error or "")
            else:
                assert first.stop_type == StopType.NORMAL and int(first.output or "") > 5000 * count
    print({count: round(each) for count, each in used.items()})
    record_property("bytes of a call", used)
    assert used[MOST_CALLS] < 1.2 * used[MOST_CALLS // 4]


def was_made(fleet: Fleet, call: str) -> bool:
    """Whether a call has had its effect, by the beginning of its line."""
    return any(line.startswith(call) for line in effects(fleet))


def stored(client: Any) -> int:
    """Bytes of all keys."""
    return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter(count=1000))


async def no_open_round(database: Database) -> bool:
    return not await ask(database, "SELECT 1 FROM rounds WHERE state IN ('requested', 'running') LIMIT 1")


def output_of(chat_key: str) -> str:
    """What a program of ``ASKS`` prints."""
    ticks = [f"{chat_key} {number}" for number in range(5)]
    return (
        f"kept {chat_key} kept\n{ticks} receipt {chat_key} 3 {chat_key} paid\n"
        f"announced {chat_key} kept {chat_key} told\n"
    )


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) << 10
