"""A Redis that restarts, freezes, refuses writes or loses data: callers get errors, workers recover."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from chaos_world import (
    HELD,
    Account,
    accepted,
    call,
    client_of,
    key,
    opened,
    publish_methods,
    release,
    rows,
    started,
    times,
    until_quiet,
    worker_that_runs,
)
from waiting import eventually
from worker_fleet import Fleet

from nekro_agent.errors import BrokerUnavailableError, OutcomeUnknownError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MakeChaos = Callable[..., Fleet]


def follow(account: Account, services: Any, count: int, seconds: float) -> list[asyncio.Task[None]]:
    """Send calls, half of them with an effect."""
    names = [f"{'E' if n % 2 else 'T'}{n}" for n in range(count)]
    return [
        asyncio.create_task(
            account.follow(name, call(services, "effect" if name[0] == "E" else "work", name, seconds))
        )
        for name in names
    ]


async def probe_every(fleet: Fleet, services: Any, count: int, *, seconds: float = 15) -> None:
    """Wait until ``count`` worker processes serve calls."""
    pids: set[str] = set()

    async def served() -> bool:
        name = f"T-probe-{time.monotonic()}"
        await asyncio.gather(*(call(services, "work", f"{name}-{n}", 0.1) for n in range(8)))
        pids.update(worker_pid(fleet, name))
        return len(pids) >= count

    await eventually(served, seconds=seconds, what=f"{count} workers to serve")


def worker_pid(fleet: Fleet, prefix: str) -> set[str]:
    """Processes that ran calls whose names have this prefix."""
    from chaos_world import journal

    return {line[2] for line in journal(fleet) if line[1].startswith(prefix)}


async def test_11_lost_connections_run_nothing_twice(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", "methods", concurrency=8)
    account = Account()
    async with opened(fleet) as services:
        tasks = follow(account, services, 16, 4)
        await started(fleet, *(f"T{n}" for n in range(0, 16, 2)))
        for _ in range(5):
            with client_of(fleet) as client:
                client.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.4)
        await asyncio.gather(*tasks)
        begin = time.monotonic()
        await probe_every(fleet, services, 2)
    print(
        f"ok={len(account.ok)} errors={dict(account.error_kinds)}; "
        f"all workers serve after {time.monotonic() - begin:.1f} s"
    )
    assert len(account.ok) == 16, (account.errors, account.wild)
    assert {name: n for name, n in times(fleet, "start").items() if n > 1} == {}


async def test_12_lost_subscriptions_lose_no_result(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", concurrency=200)
    account = Account()
    async with opened(fleet) as services:
        tasks = follow(account, services, 200, 2)
        await eventually(lambda: len(times(fleet, "start")) > 50, what="calls to start")
        with client_of(fleet) as client:
            for kind in ("pubsub", "normal"):
                client.client_kill_filter(_type=kind, skipme=True)
        await asyncio.gather(*tasks)
    assert len(account.ok) == 200, (account.errors, account.wild)


async def test_13_redis_killed_and_restarted_with_its_data(make_chaos: MakeChaos, own_redis: Any) -> None:
    fleet = make_chaos(append_only=True, broker={"calls_per_chat": 200})
    fleet.start("methods", "methods", concurrency=4)
    account = Account()
    async with opened(fleet) as services:
        tasks = follow(account, services, 200, 0.3)
        await accepted(services, 150)
        await eventually(lambda: account.count >= 60, what="calls to end")
        await asyncio.to_thread(own_redis.kill)
        await asyncio.sleep(3)
        await asyncio.to_thread(own_redis.start)
        back_at = time.monotonic()
        await asyncio.gather(*tasks)
        ended = time.monotonic() - back_at
        await probe_every(fleet, services, 2)
        doubled, missing = await account.doubled_and_missing(services, fleet)
    print(
        f"ok={len(account.ok)} errors={dict(account.error_kinds)}; all ended {ended:.1f} s after the return"
    )
    assert (account.wild, account.unknown, account.errors, doubled, missing) == ({}, [], {}, [], [])
    assert {name for name, n in times(fleet, "start").items() if n > 1 and name[0] == "E"} == set()


async def test_14_redis_restarted_empty_loses_no_accepted_call(
    make_chaos: MakeChaos, own_redis: Any, each_database: str
) -> None:
    fleet = make_chaos(each_database, broker={"calls_per_chat": 200})
    fleet.start("methods", "methods", concurrency=4)
    account = Account()
    async with opened(fleet) as services:
        tasks = follow(account, services, 120, 1)
        await accepted(services, 80)
        await eventually(lambda: account.count >= 30, what="calls to end")
        await asyncio.to_thread(own_redis.kill)
        await asyncio.to_thread(own_redis.start)
        back_at = time.monotonic()
        await asyncio.gather(*tasks)
        ended = time.monotonic() - back_at
        doubled, missing = await account.doubled_and_missing(services, fleet)
    twice = [name for name, n in times(fleet, "start").items() if n > 1]
    print(
        f"ok={len(account.ok)} unknown={len(account.unknown)} tools twice={len(twice)}; "
        f"all ended {ended:.1f} s after the return"
    )
    assert (account.wild, account.errors, doubled, missing) == ({}, {}, [], [])
    assert all(name[0] == "T" for name in twice)


async def test_14_sweep_republishes_calls_of_a_dead_caller_from_a_lost_queue(
    make_chaos: MakeChaos, own_redis: Any, each_database: str
) -> None:
    fleet = make_chaos(each_database)
    publish_methods(fleet)
    async with opened(fleet) as services:
        left = asyncio.create_task(call(services, "effect", "E1"))
        with client_of(fleet) as client:
            await eventually(lambda: client.llen(key(fleet, "methods")) == 1, what="the message")
        # As if the process had died: all of the caller's tasks stop, and its row stays.
        left.cancel()
        services._caller._ledger = None
        await asyncio.gather(left, return_exceptions=True)
    own_redis.kill()
    own_redis.start()
    async with opened(fleet) as services:
        states = await rows(services, "SELECT state FROM calls")
        if [tuple(row) for row in states] == [("queued",)]:
            fleet.start("methods")
            await eventually(lambda: times(fleet, "end")["E1"] == 1, what="the sweep to send it again")
    assert times(fleet, "start") == {"E1": 1}


async def test_15_frozen_redis_is_reported_within_seconds_and_recovers(
    make_chaos: MakeChaos, own_redis: Any
) -> None:
    fleet = make_chaos()
    fleet.start("methods", "methods")
    account = Account()
    async with opened(fleet) as services:
        running = asyncio.create_task(account.follow("E0", call(services, "effect", "E0", HELD)))
        await started(fleet, "E0")
        os.kill(own_redis.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(OutcomeUnknownError):  # Redis reads the message when it resumes
            await call(services, "work", "T1")
        reported_after = time.monotonic() - begin
        await asyncio.sleep(15)
        os.kill(own_redis.process.pid, signal.SIGCONT)
        back = time.monotonic()
        release(fleet)
        await running
        await probe_every(fleet, services, 2, seconds=60)
        print(f"error after {reported_after:.1f} s; both workers serve {time.monotonic() - back:.1f} s later")
    assert account.ok == ["E0"], (account.errors, account.wild)
    assert times(fleet, "start")["E0"] == 1


async def test_16_workers_wait_for_a_redis_that_is_down_at_start(
    make_chaos: MakeChaos, own_redis: Any
) -> None:
    fleet = make_chaos()
    publish_methods(fleet)
    own_redis.kill()
    async with opened(fleet) as services:
        begin = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            await call(services, "work", "T1")
        print(f"error after {time.monotonic() - begin:.1f} s")
        starting = asyncio.create_task(asyncio.to_thread(fleet.start, "methods"))
        await asyncio.sleep(2)
        await asyncio.to_thread(own_redis.start)
        await starting
        assert await call(services, "work", "T2") == "T2"


async def test_17_redis_out_of_memory_keeps_results_and_workers(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", "methods", concurrency=4)
    account = Account()
    async with opened(fleet) as services:
        tasks = follow(account, services, 20, 1)
        await accepted(services, 20)
        await eventually(lambda: len(times(fleet, "start")) >= 8, what="calls to start")
        with client_of(fleet) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            with pytest.raises(BrokerUnavailableError, match="maxmemory"):
                await call(services, "work", "T-refused")
            await asyncio.sleep(3)
            client.config_set("maxmemory", 0)
        await asyncio.gather(*tasks)
        await probe_every(fleet, services, 2)
        doubled, missing = await account.doubled_and_missing(services, fleet)
    assert len(account.ok) == 20, (account.errors, account.wild, account.unknown)
    assert (doubled, missing) == ([], [])


async def test_35_mutex_of_a_dead_worker_blocks_nothing(make_chaos: MakeChaos) -> None:
    fleet = make_chaos()
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        running = asyncio.create_task(call(services, "work", "T1", HELD))
        await started(fleet, "T1")
        # As the transport acquires it; after a crash it stays held until it expires.
        with client_of(fleet) as client:
            client.set(key(fleet, "unacked.methods_mutex"), b"dead", ex=10)
        killed_at = time.monotonic()
        worker_that_runs(fleet, "T1").kill()
        release(fleet)
        assert await running == "T1"
        print(f"redelivered and done after {time.monotonic() - killed_at:.1f} s")
        await until_quiet(fleet)
