"""Overload: clear refusals, fair shares, and faulty clocks and storage."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest
from chaos_world import (
    HELD,
    Account,
    call,
    client_of,
    key,
    opened,
    release,
    rows,
    started,
    times,
    until_quiet,
)
from sqlalchemy.engine import make_url
from waiting import eventually
from worker_fleet import Fleet, call_in

from nekro.app.calls.dispatch import CallScope
from nekro.app.services import Services
from nekro.wire.invocation import Envelope
from nekro.wire.values import encode_arguments
from nekro_agent.errors import StorageUnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MakeChaos = Callable[..., Fleet]


async def work(services: Services, scope: CallScope, *args: Any, seconds: float) -> Envelope:
    """Call ``work`` for an existing chat, so that thousands of calls contend for the queue, not its row."""
    return await call_in(
        services,
        await services.find_method("work"),
        encode_arguments(args, {}),
        scope,
        seconds=seconds,
    )


async def test_32_burst_beyond_the_limit_is_refused_and_the_rest_finishes(make_chaos: MakeChaos) -> None:
    fleet = make_chaos(broker={"max_queued": 500, "calls_per_chat": 10_000})
    fleet.start("methods", concurrency=8)
    account = Account()
    async with opened(fleet) as services:
        await call(services, "work", "T-first")
        with client_of(fleet) as client:
            before = client.info("memory")["used_memory"]
            scope = CallScope(chat=await services.chat("chaos"), user_id=None)
            names = [f"T{n}" for n in range(10_000)]
            await asyncio.gather(
                *(account.follow(name, work(services, scope, name, 0.2, seconds=120)) for name in names)
            )
            await until_quiet(fleet)
            results = client.keys(key(fleet, "celery-task-meta-*"))
            if results:
                client.delete(*results)  # they expire
            after = client.info("memory")["used_memory"]
    kinds = account.error_kinds
    refused = [account.seconds[name] for name in account.errors]
    print(
        f"ok={len(account.ok)} {dict(kinds)} refused within {max(refused):.2f} s; Redis {before} -> {after}"
    )
    assert set(kinds) == {"OverloadedError"} and account.wild == {}
    assert len(account.ok) + len(account.errors) == 10_000 and len(account.ok) >= 500
    assert "the limit of a queue" in next(iter(account.errors.values()))
    assert after < before + (1 << 20)


async def test_chat_with_thousands_of_calls_does_not_starve_the_others(make_chaos: MakeChaos) -> None:
    fleet = make_chaos(broker={"calls_per_chat": 32})
    fleet.start("methods", concurrency=8)
    async with opened(fleet) as services:
        chats = ("greedy", *(f"modest{n}" for n in range(10)))
        greedy, *modest = [CallScope(chat=await services.chat(key), user_id=None) for key in chats]
        flood = [asyncio.create_task(work(services, greedy, f"T{n}", 0.01, seconds=120)) for n in range(3000)]
        await eventually(lambda: len(times(fleet, "start")) > 50, what="the flood")
        waits = []
        for number, scope in enumerate(modest):
            begin = time.monotonic()
            await work(services, scope, f"T-modest{number}", seconds=120)
            waits.append(time.monotonic() - begin)
        done = sum(task.done() for task in flood)
        await asyncio.gather(*flood)
    print(f"ten modest calls took at most {max(waits):.2f} s, with {3000 - done} of the flood still waiting")
    assert done < 2500, "the modest calls did not wait for the flood"


async def test_33_full_long_lane_leaves_other_calls_alone(make_chaos: MakeChaos) -> None:
    fleet = make_chaos(workers={"long_methods": "tests.chaos.block"})
    fleet.start("methods", "long")
    async with opened(fleet) as services:

        async def typical() -> float:
            begin = time.monotonic()
            await asyncio.gather(*(call(services, "work", f"T{begin}-{n}") for n in range(50)))
            return time.monotonic() - begin

        await typical()
        alone = min([await typical() for _ in range(5)])
        busy = [asyncio.create_task(call(services, "block", f"T-b{n}", 2, seconds=60)) for n in range(12)]
        await started(fleet, "T-b0")
        beside = min([await typical() for _ in range(5)])
        await asyncio.gather(*busy)
    print(f"50 calls: alone {alone * 1000:.0f} ms, beside a full lane long {beside * 1000:.0f} ms")


async def test_34_workers_with_other_timeouts_run_nothing_twice(make_chaos: MakeChaos) -> None:
    """The lane's workers disagree: the one with the longer timeout must not lose its calls to the other."""
    fleet = make_chaos()
    longer = fleet.settings.model_copy(
        update={"broker": fleet.settings.broker.model_copy(update={"visibility_timeout_seconds": 30})}
    )
    fleet.start("methods", settings=longer)
    async with opened(fleet) as services:
        running = [asyncio.create_task(call(services, "work", f"T{n}", 12)) for n in range(4)]
        await started(fleet, *(f"T{n}" for n in range(4)))
        fleet.start("methods")
        await asyncio.gather(*running)
    assert set(times(fleet, "start").values()) == {1}


async def test_a_test_that_fails_ends_its_calls_before_its_services_close(make_chaos: MakeChaos) -> None:
    """Else they ended with the loop, and each waited to revoke its call on closed connections."""
    fleet = make_chaos()
    fleet.start("methods")
    with pytest.raises(RuntimeError, match="the test fails"):
        async with opened(fleet) as services:
            running = asyncio.create_task(call(services, "work", "T1", HELD))
            await started(fleet, "T1")
            raise RuntimeError("the test fails")
    assert running.cancelled()
    release(fleet)


async def test_36_locked_sqlite_delays_calls_without_failing_them(make_chaos: MakeChaos) -> None:
    fleet = make_chaos("sqlite")
    fleet.start("methods")
    account = Account()
    async with opened(fleet) as services:
        running = asyncio.create_task(account.follow("E1", call(services, "effect", "E1", HELD)))
        await started(fleet, "E1")
        path = make_url(fleet.settings.database.url or "").database
        with sqlite3.connect(path, isolation_level=None) as lock:
            lock.execute("BEGIN EXCLUSIVE")
            release(fleet)
            await asyncio.sleep(8)
            lock.execute("ROLLBACK")
        lock.close()
        await running
        doubled, missing = await account.doubled_and_missing(services, fleet)
    print(f"ok={account.ok} errors={account.errors}")
    assert (account.ok, doubled, missing) == (["E1"], [], [])


async def test_36_postgres_connections_that_are_cut_lose_no_effect(make_chaos: MakeChaos) -> None:
    fleet = make_chaos("postgres")
    fleet.start("methods", "methods")
    account = Account()
    async with opened(fleet) as services:
        names = [f"E{n}" for n in range(60)]
        tasks = [
            asyncio.create_task(account.follow(n, call(services, "effect", n, 0.2, seconds=30)))
            for n in names
        ]
        for _ in range(8):
            await asyncio.sleep(0.1)
            await drop_connections(fleet)
        await asyncio.gather(*tasks)
        with contextlib.suppress(StorageUnavailableError):  # the connections of this check were cut, too
            await rows(services, "SELECT 1")
        doubled, missing = await account.doubled_and_missing(services, fleet)
        await call(services, "effect", "E-last")
    print(f"ok={len(account.ok)} unknown={len(account.unknown)} errors={dict(account.error_kinds)}")
    assert (account.wild, doubled, missing) == ({}, [], [])


async def drop_connections(fleet: Fleet) -> None:
    """Cut every connection of the fleet's database, as an immediate restart does."""
    import psycopg

    url = make_url(fleet.settings.database.url or "").set(drivername="postgresql")

    def cut() -> None:
        with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    await asyncio.to_thread(cut)


async def test_keys_descriptors_and_threads_do_not_grow(make_chaos: MakeChaos) -> None:
    """Counts after many calls equal those after few; results expire."""
    fleet = make_chaos()
    (worker,) = fleet.start("methods")

    def figures() -> tuple[int, int, int]:
        with client_of(fleet) as client:
            keys = [name for name in client.keys(key(fleet, "*")) if b"celery-task-meta" not in name]
        from pathlib import Path

        process = Path(f"/proc/{worker.pid}")
        return len(keys), len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

    async def batch(services: Any, name: str, count: int) -> None:
        gate = asyncio.Semaphore(100)

        async def one(n: int) -> None:
            async with gate:
                await call(
                    services, "effect" if n % 5 == 0 else "work", f"{'E' if n % 5 == 0 else 'T'}{name}{n}"
                )

        await asyncio.gather(*(one(n) for n in range(count)))
        await until_quiet(fleet)

    async with opened(fleet) as services:
        await batch(services, "a", 500)
        first = figures()
        await batch(services, "b", 3000)
        second = figures()
        left = await rows(services, "SELECT state, count(*) FROM calls GROUP BY state")
    print(f"keys, descriptors, threads: {first} -> {second}; rows {[tuple(row) for row in left]}")
    assert second[0] <= first[0] and second[1] <= first[1] + 10 and second[2] <= first[2] + 5
