"""Single statements: connections, cancellation, errors, databases that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvloop
from cut_proxy import CutProxy
from loop_clock import LoopClock, time_passes
from sqlalchemy import insert, select, text
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import DatabaseSettings, StoreSettings
from nekro_agent.errors import ConflictError, InvalidValueError, StorageUnavailableError
from storage.driver.pool import FifoSemaphore
from storage.driver.statements import SingleStatement
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.tables import LEASES, PLUGIN_VALUES

ADD_LEASE = SingleStatement(
    lambda _dialect: insert(LEASES).values(name="a", fence=0).returning(LEASES.c.fence), writes=True
)


class Store:
    """One plugin's values by store key."""

    def __init__(self, database: Database) -> None:
        self._store = SqlKeyValueStore(database, StoreSettings())

    async def set(self, key: str, value: str = "v") -> bool:
        return await self._store.set("a.b", chat_key="", user_key="", store_key=key, value=value)

    async def get(self, key: str) -> str | None:
        return await self._store.get("a.b", chat_key="", user_key="", store_key=key)


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


def sqlite_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "sqlite"}


# --- connections -----------------------------------------------------------------------------------


@pytest.mark.extended
async def test_a_thousand_statements_and_transactions_at_once_stay_within_the_pool(
    tmp_path: Path, migrated_settings: DatabaseSettings
) -> None:
    database = Database(migrated_settings.model_copy(update={"pool_size": 3}), tmp_path)
    store = Store(database)

    async def one(number: int) -> str | None:
        if number % 10 == 0:
            async with database.begin() as tx:
                await tx.connection.execute(
                    text("INSERT INTO leases (name, fence) VALUES (:name, 0)"), {"name": str(number)}
                )
        await store.set(str(number), str(number))
        return await store.get(str(number))

    connections = 0
    work = asyncio.gather(*(one(number) for number in range(1000)))
    while not work.done():
        connections = max(connections, await asyncio.to_thread(_connections, migrated_settings))
    assert await work == [str(number) for number in range(1000)]
    assert connections <= 3
    await database.dispose()

    async def are_closed() -> bool:
        return await asyncio.to_thread(_connections, migrated_settings) == 0

    await eventually(are_closed, what="the server to end the connections")


def _connections(settings: DatabaseSettings) -> int:
    """Number of connections according to the database server; 0 for a file."""
    url = str(settings.url)
    if url.startswith("sqlite"):
        return 0
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE application_name = 'nekro' AND datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


async def test_one_connection_serves_statements_and_transactions_alternately(
    tmp_path: Path, migrated_settings: DatabaseSettings
) -> None:
    """A connection that is cached for the next statement is returned when a transaction needs it."""
    limits = {"pool_size": 1, "pool_timeout_seconds": 5}
    database = Database(migrated_settings.model_copy(update=limits), tmp_path)
    store = Store(database)
    for number in range(5):
        await store.set("k", str(number))
        async with database.read() as tx:
            assert (await tx.connection.execute(select(PLUGIN_VALUES.c.value))).scalar_one() == str(number)
        assert await store.get("k") == str(number)
    await database.dispose()


async def test_missing_connection_is_an_error_after_the_time_limit(
    tmp_path: Path, migrated_copy: Any
) -> None:
    limits = {"pool_size": 1, "pool_timeout_seconds": 0.05}
    database = Database(migrated_copy("postgres").model_copy(update=limits), tmp_path)
    async with database.read():
        with pytest.raises(StorageUnavailableError, match="POOL_SIZE"):
            await Store(database).get("k")
    assert await Store(database).get("k") is None
    await database.dispose()


def test_every_loop_has_its_own_connections_and_leaves_none(
    migrated_settings: DatabaseSettings, tmp_path: Path
) -> None:
    before = sqlite_threads()
    database = Database(migrated_settings, tmp_path)
    created: list[bool] = []

    async def work() -> None:
        created.extend(await asyncio.gather(*(Store(database).set(str(number)) for number in range(20))))
        await database.dispose_loop()

    runs: list[Callable[..., None]] = [asyncio.run, uvloop.run, asyncio.run]
    threads = [threading.Thread(target=run, args=(work(),)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert (created.count(True), created.count(False)) == (20, 40)
    assert sqlite_threads() == before


async def test_dispose_closes_the_cached_connections_of_other_loops(database: Database) -> None:
    before = sqlite_threads()
    started, stop = threading.Event(), threading.Event()

    async def live() -> None:
        await Store(database).set("k")
        await Store(database).get("k")
        started.set()
        await asyncio.to_thread(stop.wait, 30)

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    await asyncio.to_thread(started.wait, 30)
    await database.dispose()
    assert sqlite_threads() == before
    stop.set()
    await asyncio.to_thread(thread.join, 30)
    assert await Store(database).get("k") == "v"


def test_loop_that_ended_without_dispose_leaves_no_thread(migrated_copy: Any, tmp_path: Path) -> None:
    before = sqlite_threads()
    database = Database(migrated_copy("sqlite"), tmp_path)
    asyncio.run(Store(database).set("k"))
    gc.collect()
    for thread in sqlite_threads() - before:
        thread.join(WAIT_SECONDS)
    assert sqlite_threads() == before
    asyncio.run(database.dispose())


# --- guarantees of a statement ------------------------------------------------------------------------


async def test_digest_of_a_scope_equals_that_of_older_versions(database: Database) -> None:
    scope = {"chat_key": "c\0", "user_key": "\ud800", "store_key": "ключ"}
    await SqlKeyValueStore(database, StoreSettings()).set("a.b", **scope, value="v")
    expected = hashlib.sha256()
    for key in ("a.b", *scope.values()):
        encoded = key.encode("utf-8", "surrogatepass")
        expected.update(len(encoded).to_bytes(8, "big") + encoded)
    async with database.read() as tx:
        found = (await tx.connection.execute(select(PLUGIN_VALUES.c.digest))).scalar_one()
    assert found == expected.digest()


async def test_write_inside_a_transaction_is_refused_instead_of_deadlocking(
    database: Database, store: Store
) -> None:
    async with database.begin():
        with pytest.raises(RuntimeError, match="already inside a write transaction"):
            await store.set("k")
        assert await store.get("k") is None
    assert await store.set("k") is True


async def test_statement_cancelled_at_any_point_leaves_the_database_usable(store: Store) -> None:
    for turns in range(40):
        tasks = [asyncio.create_task(store.set(f"n{turns}")), asyncio.create_task(store.get("k"))]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert await store.set("last") is True
    assert await asyncio.gather(*(store.get("last") for _ in range(20))) == ["v"] * 20


async def test_violated_constraint_is_a_conflict_and_leaks_no_connection(database: Database) -> None:
    assert await database.run(ADD_LEASE, {}) == 0
    for _ in range(12):  # more than there are connections
        with pytest.raises(ConflictError):
            await database.run(ADD_LEASE, {})


async def test_missing_schema_is_an_error_that_names_the_fix(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    database = Database(database_settings, tmp_path)
    with pytest.raises(StorageUnavailableError, match="nekro db upgrade"):
        await Store(database).get("k")
    with pytest.raises(StorageUnavailableError, match="nekro db upgrade"):
        await Store(database).set("k")
    await database.dispose()


async def test_value_refused_by_a_column_reaches_no_connection(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.repositories.plugin_states.MAX_KEY_CHARS", 2048)
    store = SqlKeyValueStore(database, StoreSettings())
    with pytest.raises(InvalidValueError, match="1250"):
        await store.set("p" * 1251, chat_key="", user_key="", store_key="k", value="v")


# --- SQLite: one writer ----------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(settings: DatabaseSettings) -> Any:
    """Hold the write lock, as another process would."""
    other = sqlite3.connect(str(settings.url).removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


async def test_writers_wait_for_another_process_and_readers_do_not(
    migrated_copy: Any, tmp_path: Path
) -> None:
    settings = migrated_copy("sqlite")
    database = Database(settings, tmp_path)
    store = Store(database)
    await store.set("k", "old")
    with locked(settings):
        write = asyncio.create_task(store.set("k", "new"))
        assert [await store.get("k") for _ in range(3)] == ["old"] * 3
        assert not write.done()
    assert await write is False
    assert await store.get("k") == "new"
    await database.dispose()


async def test_values_are_read_without_a_thread(migrated_copy: Any, tmp_path: Path) -> None:
    database, before = Database(migrated_copy("sqlite"), tmp_path), sqlite_threads()
    store = Store(database)
    assert await asyncio.gather(*(store.get("k") for _ in range(20))) == [None] * 20
    assert sqlite_threads() == before
    await store.set("k", "v")
    assert await store.get("k") == "v"
    assert len(sqlite_threads() - before) == 1
    await database.dispose()
    assert sqlite_threads() == before


async def test_an_exclusively_locked_database_is_waited_for_without_blocking_the_loop(
    migrated_copy: Any, tmp_path: Path
) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"pool_timeout_seconds": 0.5})
    database, path = Database(settings, tmp_path), str(settings.url).removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN IMMEDIATE")
        reading = asyncio.create_task(Store(database).get("k"))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(StorageUnavailableError, match="database is locked"):
            await reading
        assert turns > 1  # the loop was not blocked
        other.execute("ROLLBACK")
    assert await Store(database).get("k") is None
    await database.dispose()


async def test_write_that_waits_too_long_gets_an_error(migrated_copy: Any, tmp_path: Path) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"pool_timeout_seconds": 0.05})
    database = Database(settings, tmp_path)
    with locked(settings), pytest.raises(StorageUnavailableError, match="database is locked"):
        await Store(database).set("k")
    async with database.begin():
        with pytest.raises(StorageUnavailableError, match="kept SQLite busy"):
            await asyncio.create_task(Store(database).set("k"))
    assert await Store(database).set("k") is True
    await database.dispose()


async def test_statement_waits_for_a_lock_no_longer_than_a_transaction_may_take(
    migrated_copy: Any, tmp_path: Path
) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"transaction_timeout_seconds": 0.05})
    database = Database(settings, tmp_path)
    with locked(settings), pytest.raises(StorageUnavailableError, match="database is locked"):
        await Store(database).set("k")
    await database.dispose()


async def test_queued_write_of_a_cancelled_caller_is_not_started(migrated_copy: Any, tmp_path: Path) -> None:
    settings = migrated_copy("sqlite")
    database = Database(settings, tmp_path)
    store = Store(database)
    await store.set("k")
    with locked(settings):
        first = asyncio.create_task(store.set("first"))
        cancelled = asyncio.create_task(store.set("cancelled"))
        last = asyncio.create_task(store.set("last"))
        await store.get("k")
        cancelled.cancel()
    assert await asyncio.gather(first, last) == [True, True]
    assert await store.get("cancelled") is None
    await database.dispose()


async def test_transaction_is_not_starved_by_single_writes() -> None:
    semaphore = FifoSemaphore(1, seconds=WAIT_SECONDS, error="")
    entered: list[str] = []

    async def single(name: str) -> None:
        await semaphore.acquire(shared=True)
        entered.append(name)
        await may_leave.wait()
        semaphore.release()

    async def transaction() -> None:
        await semaphore.acquire()
        entered.append("transaction")
        semaphore.release()

    may_leave = asyncio.Event()
    tasks = [asyncio.create_task(single(name)) for name in ("first", "beside")]
    tasks.append(asyncio.create_task(transaction()))
    tasks += [asyncio.create_task(single(name)) for name in ("behind", "behind too")]
    await asyncio.sleep(0)
    assert entered == ["first", "beside"]
    may_leave.set()
    await asyncio.gather(*tasks)
    assert entered == ["first", "beside", "transaction", "behind", "behind too"]


# --- a PostgreSQL that stops ---------------------------------------------------------------------------


async def test_frozen_server_is_an_error_after_the_time_limit_and_leaks_no_connection(
    proxied: tuple[Database, CutProxy],
) -> None:
    database, proxy = proxied
    store, clock = Store(database), LoopClock()
    at_once = range(database.settings.pool_size)
    await asyncio.gather(*(store.get("k") for _ in at_once))
    proxy.frozen.set()
    waiting = [asyncio.create_task(store.get("k")) for _ in at_once]
    await time_passes(clock, waiting)
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(failure) for failure in failures} == {StorageUnavailableError}
    proxy.frozen.clear()
    assert await asyncio.gather(*(store.get("k") for _ in range(50))) == [None] * 50


async def test_idle_connections_that_were_cut_are_replaced_without_an_error(
    proxied: tuple[Database, CutProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, proxy = proxied
    store = Store(database)
    monkeypatch.setattr("storage.driver.pool.FRESH_SECONDS", 0)
    await asyncio.gather(*(store.set(str(number)) for number in range(20)))
    proxy.cut()
    assert await asyncio.gather(*(store.get(str(number)) for number in range(20))) == ["v"] * 20


async def test_after_one_broken_connection_all_of_its_age_are_checked(
    proxied: tuple[Database, CutProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, proxy = proxied
    store = Store(database)
    monkeypatch.setattr("storage.driver.pool.FRESH_SECONDS", 3600)
    await asyncio.gather(*(store.set(str(number)) for number in range(20)))
    proxy.cut()
    with pytest.raises(StorageUnavailableError):  # what plugins ask would be repeated
        async with database.read() as tx:
            await tx.connection.execute(select(PLUGIN_VALUES.c.value))
    assert await asyncio.gather(*(store.get(str(number)) for number in range(20))) == ["v"] * 20


async def test_transaction_on_a_broken_connection_makes_cached_ones_be_checked(
    proxied: tuple[Database, CutProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, proxy = proxied
    store = Store(database)
    monkeypatch.setattr("storage.driver.pool.FRESH_SECONDS", 3600)
    await store.set("k")
    async with database.read() as tx:
        proxy.cut()
        with pytest.raises(StorageUnavailableError):
            await tx.connection.execute(select(PLUGIN_VALUES.c.value))
    assert await store.get("k") == "v"
