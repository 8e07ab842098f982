"""Cancelled calls of a database do not disturb others, whenever and however often they are cancelled."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cancellation import cancelled_at
from cut_proxy import CutProxy
from sqlalchemy import text
from waiting import WAIT_SECONDS

from broker_config.settings import StoreSettings
from nekro_agent.methods import SandboxMethodType
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.repositories.calls import CallRequest
from storage.states import CallState
from workers.pools.jobs import Interruptible, PoolJob, StopReason

#: Concurrent calls.
AT_ONCE = 40


def delivery() -> PoolJob:
    """A job that is stopped and never reported."""
    return PoolJob(
        target=print,
        args=("task", "id"),
        kwargs={},
        callback=lambda _: None,
        accept_callback=None,
        error_callback=None,
        timeout_callback=None,
        soft_limit_seconds=None,
        hard_limit_seconds=None,
    )


async def claim_and_finish(database: Database, call_id: str) -> None:
    """Do what a worker does with a call, and write a text beside its record."""
    request = CallRequest(id=call_id, method="a.m.f", type=SandboxMethodType.BEHAVIOR, chat_key="chat")
    async with database.autocommit() as tx:
        claim = await tx.calls.claim(request, worker="w", lease_seconds=60)
    async with database.begin() as tx:
        await tx.chats.lock(f"chat {random.randrange(5)}", create=True)
        await tx.calls.finish(call_id, fence=claim.fence, outcome={"text": call_id})


class Load:
    """Random calls, some of which are cancelled once, twice or three times, a moment apart."""

    def __init__(self, database: Database, *, calls: int, cancels: int, seed: int) -> None:
        self._database, self._random = database, random.Random(seed)
        self._cancelled = set(self._random.sample(range(calls), cancels))
        self._calls = calls
        self.seconds: list[float] = []
        self.recorded: set[str] = set()
        self.incidents: list[str] = []

    async def run(self) -> None:
        numbers = iter(range(self._calls))
        await asyncio.gather(*(self._work(numbers) for _ in range(AT_ONCE)))

    async def _work(self, numbers: Any) -> None:
        for number in numbers:
            await self._one(number)

    async def _one(self, number: int) -> None:
        call_id = f"call {number}"
        began = time.perf_counter()
        task = asyncio.create_task(claim_and_finish(self._database, call_id))
        if number in self._cancelled:
            await self._cancel(task)
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if number not in self._cancelled:
            self.seconds.append(time.perf_counter() - began)
        if outcome is None:
            self.recorded.add(call_id)
        elif not (number in self._cancelled and isinstance(outcome, asyncio.CancelledError)):
            self.incidents.append(f"{call_id}: {outcome!r}")

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        pauses = [self._random.choice((0, 0, 0.0005, 0.002)) for _ in range(self._random.randint(1, 3))]
        await asyncio.sleep(self._random.random() * 0.02)
        for pause in pauses:
            task.cancel()
            await asyncio.sleep(pause)

    async def check(self) -> None:
        """Compare the rows with the outcomes that callers saw."""
        async with self._database.read() as tx:
            rows = await tx.connection.execute(text("SELECT id, state FROM calls"))
            done = {call_id for call_id, state in rows if state == CallState.DONE}
        assert self.incidents == []
        assert self.recorded <= done, "a caller got a record that is missing"
        assert len(self.recorded) >= self._calls - len(self._cancelled)

    def p99_seconds(self) -> float:
        """Calls that were not cancelled."""
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("calls", "cancels"),
    [(1000, 250), pytest.param(20_000, 5_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
async def test_cancelled_calls_do_not_disturb_the_others(
    database: Database, calls: int, cancels: int, record_property: Callable[[str, object], None]
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    load = Load(database, calls=calls, cancels=cancels, seed=seed)
    began = time.perf_counter()
    await load.run()
    await load.check()
    record_property("p99_seconds", load.p99_seconds())
    print(f"{calls} calls in {time.perf_counter() - began:.1f} s, p99 {load.p99_seconds() * 1000:.0f} ms")


@pytest.mark.extended
@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
async def test_a_cancellation_at_any_wait_leaves_no_connection_open(
    database: Database, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    # psycopg yields to a busy loop even where it need not wait for the server.
    monkeypatch.setattr(psycopg.waiting, "MAX_BUSY_TIME", 0)
    values = SqlKeyValueStore(database, StoreSettings())

    async def use(name: str) -> None:
        await values.get("a.p", chat_key="", user_key="", store_key=name)
        await claim_and_finish(database, name)
        async with database.read() as tx:
            await tx.connection.execute(text("SELECT count(*) FROM chats"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wait in itertools.count(1):
            work = cancelled_at(use(f"call {wait}"), wait, again=again)
            outcome = (await asyncio.gather(work, return_exceptions=True))[0]
            if outcome is None:
                break
            assert isinstance(outcome, asyncio.CancelledError)
            del outcome
            gc.collect()
    assert [str(warning.message) for warning in caught] == []


async def turns(count: int = 20) -> None:
    """Run the loop until it would have to wait."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_repeated_cancellation_waits_until_the_thread_has_left_the_connection(
    migrated_copy: Any, tmp_path: Path
) -> None:
    database = Database(migrated_copy("sqlite"), tmp_path)
    is_running, may_end = threading.Event(), threading.Event()

    def wait() -> None:  # SQLite does not interrupt a function
        is_running.set()
        may_end.wait(WAIT_SECONDS)

    async def write() -> None:
        async with database.begin() as tx:
            connection: Any = tx.connection.driver
            connection._sqlite.create_function("wait", 0, wait)
            await tx.connection.exec_driver_sql("UPDATE leases SET fence = wait()")
            await tx.connection.exec_driver_sql("SELECT wait()")

    writing = asyncio.create_task(write())
    await asyncio.to_thread(is_running.wait)
    for _ in range(3):
        writing.cancel()
        await turns()
    assert not writing.done(), "the connection is given back while its thread still uses it"
    disposing = asyncio.create_task(database.dispose())
    await turns()
    assert not disposing.done(), "the database is closed while a statement still runs"
    may_end.set()
    assert isinstance((await asyncio.gather(writing, return_exceptions=True))[0], asyncio.CancelledError)
    await disposing
    await claim_and_finish(database, "next")
    await database.dispose()


@pytest.mark.parametrize("way", ["transaction", "single"])
async def test_a_cancelled_writer_does_not_wait_for_the_lock_of_another_process(
    migrated_copy: Any, tmp_path: Path, way: str
) -> None:
    settings = migrated_copy("sqlite")
    database = Database(settings, tmp_path)
    values = SqlKeyValueStore(database, StoreSettings())
    await claim_and_finish(database, "first")
    other = sqlite3.connect(str(settings.url).removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    if way == "single":
        writing: Any = asyncio.create_task(
            values.set("a.p", chat_key="", user_key="", store_key="k", value="")
        )
    else:
        writing = asyncio.create_task(claim_and_finish(database, "kept waiting"))
    await turns()
    assert not writing.done()
    writing.cancel()
    await asyncio.wait({writing}, timeout=WAIT_SECONDS)
    assert writing.cancelled(), "it waits until the lock is free"
    other.execute("ROLLBACK")
    other.close()
    await claim_and_finish(database, "next")
    await database.dispose()


async def test_a_cancellation_waits_until_postgresql_has_rolled_back(
    migrated_copy: Any, tmp_path: Path
) -> None:
    proxy = CutProxy(migrated_copy("postgres"))
    settings = await proxy.start()
    database = Database(settings.model_copy(update={"pool_size": 1}), tmp_path)

    async def fail() -> None:
        async with database.begin() as tx:
            await tx.chats.ensure("chat")
            proxy.frozen.set()
            raise ZeroDivisionError

    failing = asyncio.create_task(fail())
    await asyncio.wait({failing, asyncio.create_task(proxy.frozen.wait())}, return_when="FIRST_COMPLETED")
    await turns()
    for _ in range(3):
        failing.cancel()
        await turns()
    assert not failing.done(), "the connection is given back inside its rollback"
    proxy.cut()
    assert isinstance((await asyncio.gather(failing, return_exceptions=True))[0], asyncio.CancelledError)
    proxy.frozen.clear()
    await claim_and_finish(database, "next")
    await database.dispose()
    await proxy.stop()


async def test_a_job_that_is_terminated_often_is_cancelled_once() -> None:
    job, over = delivery(), asyncio.Event()
    cancellations = 0

    async def body() -> None:
        nonlocal cancellations
        job.begin()
        with Interruptible():
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    cancellations += 1

    task = asyncio.create_task(body())
    await turns()
    for _ in range(5):
        job.terminate()
        job.stop(StopReason.HARD_LIMIT)
        await turns()
    over.set()
    await task
    assert cancellations == 1
    assert task.cancelling() == 0


async def test_the_hard_limit_ends_the_clean_up_of_a_job_after_its_soft_limit() -> None:
    job, caught = delivery(), []

    async def body() -> None:
        job.begin()
        try:
            with Interruptible():
                while True:
                    try:
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        caught.append(job.stop_reason)
                        if job.stop_reason is not StopReason.SOFT_LIMIT:
                            raise
        except asyncio.CancelledError:
            pass

    task = asyncio.create_task(body())
    await turns()
    for reason in (StopReason.SOFT_LIMIT, StopReason.SOFT_LIMIT, StopReason.HARD_LIMIT):
        job.stop(reason)
        await turns()
    await task
    assert caught == [StopReason.SOFT_LIMIT, StopReason.HARD_LIMIT]
    assert task.cancelling() == 0
