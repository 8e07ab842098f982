"""Transactions, several loops, many waiting callers, and databases that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvloop
from cut_proxy import CutProxy
from loop_clock import LoopClock, time_passes
from sqlalchemy import bindparam, insert, select
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import ConflictError, StorageError, StorageUnavailableError
from storage.driver.errors import is_refusal, translated
from storage.driver.statements import FixedStatement
from storage.engine import Database
from storage.migrate import upgrade
from storage.tables import LEASES
from storage.transaction import Transaction

_INSERT = FixedStatement(lambda _dialect: insert(LEASES).values(name=bindparam("name"), fence=0))
_NAMES = FixedStatement(lambda _dialect: select(LEASES.c.name).order_by(LEASES.c.name))


@pytest.fixture(params=["varying", "fixed"])
def leases(request: pytest.FixtureRequest) -> Leases:
    return Leases(fixed=request.param == "fixed")


class Leases:
    """Rows of a table, by statements that are built once or for each run."""

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed

    async def insert(self, tx: Transaction, name: str) -> None:
        if self._fixed:
            await tx.connection.execute(_INSERT, {"name": name})
        else:
            await tx.connection.execute(insert(LEASES).values(name=name, fence=0))

    async def names(self, database: Database) -> list[str]:
        async with database.read() as tx:
            if self._fixed:
                return (await tx.connection.execute(_NAMES)).scalars()
            return (await tx.connection.execute(select(LEASES.c.name).order_by(LEASES.c.name))).scalars()


async def test_block_that_ends_is_committed(leases: Leases, database: Database) -> None:
    async with database.begin() as tx:
        await leases.insert(tx, "a")
    assert await leases.names(database) == ["a"]


async def test_block_that_raises_is_rolled_back(leases: Leases, database: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as tx:
            await leases.insert(tx, "a")
            raise ZeroDivisionError
    async with database.begin() as tx:
        await leases.insert(tx, "b")
    assert await leases.names(database) == ["b"]


async def test_cancelled_block_is_rolled_back_and_the_database_stays_usable(
    leases: Leases, database: Database
) -> None:
    inserted = asyncio.Event()

    async def write_for_ever() -> None:
        async with database.begin() as tx:
            await leases.insert(tx, "a")
            inserted.set()
            await asyncio.Event().wait()

    for _ in range(12):  # more than there are connections: a leak would be noticed
        task = asyncio.create_task(write_for_ever())
        await inserted.wait()
        inserted.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await leases.names(database) == []


async def test_statement_cancelled_at_any_point_leaves_the_database_usable(
    leases: Leases, database: Database
) -> None:
    async def write(name: str) -> None:
        async with database.begin() as tx:
            await leases.insert(tx, name)

    for turns in range(40):
        task = asyncio.create_task(write(f"n{turns:02}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await write("last")
    assert "last" in await leases.names(database)


async def test_callbacks_run_in_order_and_after_the_commit_only(leases: Leases, database: Database) -> None:
    seen: list[object] = []

    async def look(number: int) -> None:
        seen.append((number, await leases.names(database)))

    async with database.begin() as tx:
        await leases.insert(tx, "a")
        tx.after_commit(lambda: look(1))
        tx.after_commit(lambda: look(2))
        assert seen == []
    assert seen == [(1, ["a"]), (2, ["a"])]
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as tx:
            tx.after_commit(lambda: look(3))
            raise ZeroDivisionError
    assert len(seen) == 2


async def test_failing_callback_undoes_nothing_and_does_not_stop_the_others(
    leases: Leases, database: Database
) -> None:
    ran = asyncio.Event()

    async def fail() -> None:
        raise ConnectionError("no broker")

    async def succeed() -> None:
        ran.set()

    async with database.begin() as tx:
        await leases.insert(tx, "a")
        tx.after_commit(fail)
        tx.after_commit(succeed)
    assert ran.is_set()
    assert await leases.names(database) == ["a"]


async def test_write_transaction_inside_another_is_refused_instead_of_deadlocking(
    database: Database,
) -> None:
    async with database.begin():
        with pytest.raises(RuntimeError, match="already inside a write transaction"):
            async with database.begin():
                pytest.fail("two write transactions of one task")


async def test_reader_does_not_wait_for_a_writer(leases: Leases, database: Database) -> None:
    async with database.begin() as tx:
        await leases.insert(tx, "a")
        assert await leases.names(database) == []


@pytest.mark.extended
async def test_thousand_callers_at_once_share_the_connections(leases: Leases, database: Database) -> None:
    async def write(number: int) -> None:
        async with database.begin() as tx:
            await leases.insert(tx, f"{number:04}")

    await asyncio.gather(
        *(write(number) for number in range(500)), *(leases.names(database) for _ in range(500))
    )
    assert len(await leases.names(database)) == 500


def test_every_loop_and_thread_has_its_own_connections(
    leases: Leases, migrated_settings: DatabaseSettings, tmp_path: Path
) -> None:
    database = Database(migrated_settings, tmp_path)

    async def work(name: str) -> None:
        for number in range(10):
            async with database.begin() as tx:
                await leases.insert(tx, f"{name}{number}")
        await database.dispose_loop()

    threads = [
        threading.Thread(target=run, args=(work(name),))
        for name, run in {"a": asyncio.run, "b": uvloop.run, "c": asyncio.run}.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    # A second loop in this thread, after loops that ended.
    assert len(asyncio.run(_names_and_dispose(leases, database))) == 30


async def _names_and_dispose(leases: Leases, database: Database) -> list[str]:
    names = await leases.names(database)
    await database.dispose()
    return names


async def test_dispose_closes_the_connections_of_other_running_loops(
    leases: Leases, database: Database
) -> None:
    started, stop = threading.Event(), threading.Event()

    def run() -> None:
        async def live() -> None:
            await leases.names(database)
            started.set()
            await asyncio.to_thread(stop.wait, 30)

        asyncio.run(live())

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(started.wait, 30)
    await database.dispose()
    stop.set()
    await asyncio.to_thread(thread.join, 30)
    assert await leases.names(database) == []


@pytest.mark.parametrize("how", ["the database is disposed", "the loop is collected"])
def test_the_connection_of_an_ended_loop_is_closed(how: str, migrated_copy: Any, tmp_path: Path) -> None:
    database = Database(migrated_copy("postgres"), tmp_path)

    async def use() -> Any:
        async with database.read() as tx:
            return tx.connection.driver

    loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
    assert loop is not None
    connection = loop.run_until_complete(use())
    loop.close()
    assert connection.is_idle
    if how == "the database is disposed":
        asyncio.run(database.dispose())
    loop = None
    gc.collect()
    assert not connection.is_idle


async def test_a_connection_in_use_during_dispose_is_closed_when_returned(
    database: Database,
) -> None:
    async with database.read() as tx:
        connection = tx.connection.driver
        await database.dispose()
        await tx.connection.exec_driver_sql("SELECT 1")
        assert connection.is_idle
    assert not connection.is_idle


async def test_dispose_waits_for_a_statement_whose_caller_was_cancelled(
    migrated_copy: Any, tmp_path: Path
) -> None:
    database = Database(migrated_copy("sqlite"), tmp_path)
    running, may_end = threading.Event(), threading.Event()

    def wait() -> None:  # not interrupted: SQLite does not stop a function
        running.set()
        may_end.wait(WAIT_SECONDS)

    async def run() -> None:
        async with database.read() as tx:
            sqlite: Any = tx.connection.driver
            sqlite._sqlite.create_function("wait", 0, wait)
            await tx.connection.exec_driver_sql("SELECT wait()")

    reading = asyncio.create_task(run())
    await asyncio.to_thread(running.wait, WAIT_SECONDS)
    reading.cancel()
    disposing = asyncio.create_task(database.dispose())
    await asyncio.sleep(0.05)
    assert not reading.done() and not disposing.done()
    may_end.set()
    await disposing
    assert reading.cancelled()


async def test_dispose_continues_after_a_statement_that_does_not_end(
    migrated_copy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[tuple[str, dict[str, Any]]],
) -> None:
    monkeypatch.setattr("storage.driver.pool.CLOSE_STEP_SECONDS", 0.2)
    proxy = CutProxy(migrated_copy("postgres"))
    database = Database(await proxy.start(), tmp_path)

    async def run() -> None:
        async with database.read() as tx:
            proxy.frozen.set()
            await tx.connection.exec_driver_sql("SELECT 1")

    reading = asyncio.create_task(run())
    await proxy.frozen.wait()
    await database.dispose()
    assert ("database_connections_abandoned", 1) in [(event, of.get("connections")) for event, of in logged]
    proxy.cut()
    with pytest.raises(StorageUnavailableError):
        await reading
    await proxy.stop()


async def test_writer_that_waits_too_long_for_sqlite_gets_an_error(
    tmp_path: Path, migrated_copy: Any
) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"pool_timeout_seconds": 0.05})
    database, other_process = Database(settings, tmp_path), Database(settings, tmp_path)
    async with database.begin() as holder:
        await holder.chats.ensure("held")

        async def write(through: Database) -> None:
            async with through.begin() as tx:
                await tx.chats.ensure("kept out")
                pytest.fail("two writers")

        with pytest.raises(StorageUnavailableError, match="kept SQLite busy"):
            await asyncio.create_task(write(database))
        with pytest.raises(StorageUnavailableError, match="database is locked"):
            await asyncio.create_task(write(other_process))
    await database.dispose()
    await other_process.dispose()


async def test_full_disk_fails_one_transaction_and_not_the_next(
    leases: Leases, tmp_path: Path, migrated_copy: Any
) -> None:
    database = Database(migrated_copy("sqlite"), tmp_path)
    with pytest.raises(StorageUnavailableError, match="full"):
        async with database.begin() as tx:
            pages = (await tx.connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
            await tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            await leases.insert(tx, "x" * 1000)
            await tx.connection.exec_driver_sql(
                "CREATE TABLE filler AS WITH RECURSIVE n(i, t) AS (SELECT 1, zeroblob(4096) "
                "UNION ALL SELECT i + 1, t FROM n WHERE i < 100) SELECT * FROM n"
            )
    for _ in range(6):  # each connection of the pool
        assert await leases.names(database) == []
    await database.dispose()


def test_sqlite_file_is_private_to_its_owner(leases: Leases, tmp_path: Path) -> None:
    asyncio.run(_names_and_dispose(leases, _fresh(tmp_path)))
    modes = {path.name: path.stat().st_mode & 0o077 for path in (tmp_path / "private").iterdir()}
    assert "nekro.db" in modes and set(modes.values()) == {0}


def _fresh(tmp_path: Path) -> Database:
    asyncio.run(upgrade(DatabaseSettings(), tmp_path / "private"))
    return Database(DatabaseSettings(), tmp_path / "private")


async def test_another_engine_of_the_process_does_not_release_the_locks_of_the_first(
    leases: Leases, tmp_path: Path, migrated_copy: Any
) -> None:
    """Otherwise the last process to close would delete the log of connections that still write to it."""
    settings = migrated_copy("sqlite")
    file = settings.url.removeprefix("sqlite:///")
    first, second = Database(settings, tmp_path), Database(settings, tmp_path)
    try:
        assert await leases.names(first) == []  # its connection stays in the pool
        assert await leases.names(second) == []
        await second.dispose()
        leaving = (
            f"import sqlite3; c = sqlite3.connect({file!r}); c.execute('PRAGMA user_version'); c.close()"
        )
        subprocess.run([sys.executable, "-c", leaving], check=True, timeout=WAIT_SECONDS)
        assert Path(f"{file}-wal").exists()
    finally:
        await first.dispose()


async def test_transaction_that_takes_too_long_is_ended(
    leases: Leases, tmp_path: Path, migrated_settings: Any
) -> None:
    settings = migrated_settings.model_copy(update={"transaction_timeout_seconds": 1})
    async with Database(settings, tmp_path) as limited, Database(migrated_settings, tmp_path) as database:
        with pytest.raises(StorageUnavailableError, match="the limit of transactions"):
            async with limited.begin() as tx:
                await leases.insert(tx, "a")
                await asyncio.Event().wait()
        assert await leases.names(database) == []


async def test_missing_schema_is_an_error_that_names_the_fix(
    leases: Leases, database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    database = Database(database_settings, tmp_path)
    with pytest.raises(StorageUnavailableError, match="nekro db upgrade"):
        await leases.names(database)
    await database.dispose()


async def test_violated_constraint_is_a_conflict_inside_the_block(leases: Leases, database: Database) -> None:
    async with database.begin() as tx:
        await leases.insert(tx, "a")
    with pytest.raises(ConflictError) as caught:
        async with database.begin() as tx:
            with pytest.raises(ConflictError):
                await leases.insert(tx, "a")
            raise ConflictError from None
    assert caught.value.__cause__ is None


# --- a PostgreSQL that stops ---------------------------------------------------------------


async def test_frozen_server_is_an_error_after_the_time_limit_and_leaks_no_connection(
    leases: Leases,
    proxied: tuple[Database, CutProxy],
) -> None:
    database, proxy = proxied
    pool_size, clock = database.settings.pool_size, LoopClock()
    await asyncio.gather(*(leases.names(database) for _ in range(pool_size)))
    proxy.frozen.set()
    waiting = [asyncio.create_task(leases.names(database)) for _ in range(pool_size)]
    await time_passes(clock, waiting)
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(failure) for failure in failures} == {StorageUnavailableError}
    proxy.frozen.clear()
    # Each failure returned its place in the pool.
    assert (
        await asyncio.gather(*(leases.names(database) for _ in range(2 * pool_size))) == [[]] * 2 * pool_size
    )


async def test_idle_connections_that_were_cut_are_replaced_without_an_error(
    leases: Leases, proxied: tuple[Database, CutProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, proxy = proxied
    monkeypatch.setattr("storage.driver.pool.FRESH_SECONDS", 0)
    await asyncio.gather(*(leases.names(database) for _ in range(20)))
    proxy.cut()
    assert await asyncio.gather(*(leases.names(database) for _ in range(20))) == [[]] * 20


async def test_a_connection_ended_by_the_server_leaves_the_outcome_of_its_statement_unknown(
    migrated_copy: Any, tmp_path: Path
) -> None:
    database = Database(migrated_copy("postgres"), tmp_path)
    with pytest.raises(StorageUnavailableError) as caught:
        async with database.begin() as tx:
            await tx.connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
    await database.dispose()
    assert getattr(caught.value.__cause__, "sqlstate", None) == "57P01"
    assert not is_refusal(caught.value)


async def test_after_one_broken_connection_the_others_are_checked(
    leases: Leases, proxied: tuple[Database, CutProxy]
) -> None:
    database, proxy = proxied
    await asyncio.gather(*(leases.names(database) for _ in range(20)))
    proxy.cut()
    with pytest.raises(StorageUnavailableError):
        await leases.names(database)
    assert await asyncio.gather(*(leases.names(database) for _ in range(20))) == [[]] * 20


async def test_unreachable_server_is_unavailable(leases: Leases, tmp_path: Path) -> None:
    database = Database(DatabaseSettings(url="postgresql://127.0.0.1:1/x"), tmp_path)
    with pytest.raises(StorageUnavailableError, match="refused"):
        await leases.names(database)
    await database.dispose()


@pytest.mark.parametrize(("way", "did_not_run"), [("begin", True), ("autocommit", False)])
async def test_a_transaction_that_cannot_begin_did_not_run(
    migrated_copy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, did_not_run: bool
) -> None:
    monkeypatch.setattr("storage.driver.pool.FRESH_SECONDS", 3600)
    settings = migrated_copy("postgres")
    database = Database(settings, tmp_path)
    async with database.read() as tx:
        backend = (await tx.connection.exec_driver_sql("SELECT pg_backend_pid()")).scalar_one()
    async with await psycopg.AsyncConnection.connect(str(settings.url), autocommit=True) as other:
        await other.execute("SELECT pg_terminate_backend(%s, 20000)", [backend])
    with pytest.raises(StorageUnavailableError) as caught:
        async with getattr(database, way)() as tx:
            await tx.connection.exec_driver_sql("SELECT 1")
    assert is_refusal(caught.value) is did_not_run
    await database.dispose()


# --- translation ---------------------------------------------------------------------------------


def _subclasses(root: type[BaseException]) -> Iterator[type[BaseException]]:
    yield root
    for child in root.__subclasses__():
        yield from _subclasses(child)


@pytest.mark.parametrize("driver_root", [sqlite3.Error, psycopg.Error])
def test_every_driver_error_is_mapped(driver_root: type[BaseException]) -> None:
    for driver_error in _subclasses(driver_root):
        names = {base.__name__ for base in driver_error.__mro__}
        ours = translated(driver_error("words\nDETAIL"))
        assert isinstance(ours, StorageError), driver_error
        assert "DETAIL" not in str(ours)
        assert isinstance(ours, ConflictError) == ("IntegrityError" in names), driver_error
        if "OperationalError" in names:
            assert isinstance(ours, StorageUnavailableError) and ours.retryable


@pytest.mark.parametrize("ends", ["well", "badly"])
async def test_a_transaction_without_a_statement_sends_no_begin(
    tmp_path: Path, migrated_copy: Any, ends: str
) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"pool_timeout_seconds": 0.05, "pool_size": 1})
    database, other_process = Database(settings, tmp_path), Database(settings, tmp_path)
    with contextlib.suppress(ZeroDivisionError):
        async with database.begin():
            if ends == "badly":
                raise ZeroDivisionError
    async with database.read() as tx:  # on the same connection
        assert await tx.chats.find("c") is None
        async with other_process.begin() as other:
            await other.chats.ensure("c")
    async with database.begin() as tx:
        assert await tx.chats.find("c") is not None
    await database.dispose()
    await other_process.dispose()


async def test_a_failed_begin_leaves_its_connection_unchanged(tmp_path: Path, migrated_copy: Any) -> None:
    settings = migrated_copy("sqlite").model_copy(update={"pool_timeout_seconds": 0.05, "pool_size": 1})
    database, other_process = Database(settings, tmp_path), Database(settings, tmp_path)
    async with other_process.begin() as other:
        await other.chats.ensure("c")
        with pytest.raises(StorageUnavailableError, match="database is locked"):
            await asyncio.create_task(_begin_and_add(database, "d"))
        async with database.read() as tx:
            assert await tx.chats.find("c") is None
    await _begin_and_add(database, "d")
    async with other_process.read() as tx:
        assert {chat.chat_key for chat in await tx.chat_listing.page(limit=9)} == {"c", "d"}
    await database.dispose()
    await other_process.dispose()


async def _begin_and_add(database: Database, chat_key: str) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(chat_key)
