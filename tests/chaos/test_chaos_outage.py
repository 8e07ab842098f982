"""Database outages while workers claim calls: short ones are invisible to callers, and no call runs late."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from chaos_world import Account, accepted, call, opened, times
from cut_proxy import CutProxy
from waiting import eventually
from worker_fleet import Fleet

MakeChaos = Callable[..., Fleet]
CALLS = 30
OUTAGE_SECONDS = 3


@asynccontextmanager
async def settings_of_workers(fleet: Fleet) -> AsyncIterator[tuple[Any, CutProxy | None]]:
    """Settings whose database can be made unreachable for workers."""
    database = fleet.settings.database
    if str(database.url).startswith("sqlite"):
        # A lock delays the workers no longer than this.
        database = database.model_copy(update={"pool_timeout_seconds": 0.2})
        yield fleet.settings.model_copy(update={"database": database}), None
        return
    proxy = CutProxy(database)
    yield fleet.settings.model_copy(update={"database": await proxy.start()}), proxy
    await proxy.stop()


@asynccontextmanager
async def outage(fleet: Fleet, proxy: CutProxy | None) -> AsyncIterator[None]:
    """Make the database unreachable for the workers."""
    if proxy is not None:
        proxy.go_away()
        yield
        proxy.come_back()
        return
    path = str(fleet.settings.database.url).removeprefix("sqlite:///")
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    yield
    lock.execute("ROLLBACK")
    lock.close()


@pytest.mark.slow
async def test_calls_delayed_by_a_database_outage_run_once_and_are_answered(
    make_chaos: MakeChaos, each_database: str
) -> None:
    fleet, account = make_chaos(each_database), Account()
    async with settings_of_workers(fleet) as (settings, proxy), opened(fleet) as services:
        (worker,) = await asyncio.to_thread(
            lambda: fleet.start("methods", concurrency=CALLS, settings=settings)
        )
        worker.freeze()
        names = [f"{'AE'[number % 2]}{number}" for number in range(CALLS)]
        methods = {"A": "wake", "E": "effect"}
        tasks = [
            asyncio.create_task(account.follow(name, call(services, methods[name[0]], name)))
            for name in names
        ]
        await accepted(services, CALLS)
        async with outage(fleet, proxy):
            worker.thaw()
            await asyncio.sleep(OUTAGE_SECONDS)
            assert not times(fleet, "start")
        await asyncio.gather(*tasks)
        await eventually(lambda: len(times(fleet, "start")) == CALLS, what="the calls to start")
        doubled, missing = await account.doubled_and_missing(services, fleet)
    print(f"ok={len(account.ok)} unknown={len(account.unknown)} errors={account.errors}")
    assert (len(account.ok), doubled, missing) == (CALLS, [], [])
