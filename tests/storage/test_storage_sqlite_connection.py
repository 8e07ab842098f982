"""SQLite's connection: what runs on the loop, what on its thread, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro_agent.errors import ConflictError, StorageUnavailableError
from storage.driver.sqlite import SqliteConnection

LONG = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def opened(path: Path, *, busy_seconds: float = WAIT_SECONDS) -> SqliteConnection:
    sqlite = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    return SqliteConnection(sqlite, busy_seconds=busy_seconds)


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[SqliteConnection]:
    made = opened(tmp_path / "test.db")
    await made.execute("CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT UNIQUE)")
    yield made
    await made.close()


@pytest.fixture
def calls(connection: SqliteConnection, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls to the connection's thread so far."""
    asked: list[object] = []
    on_thread = connection._on_thread

    async def remember(run: Any) -> Any:
        asked.append(run)
        return await on_thread(run)

    monkeypatch.setattr(connection, "_on_thread", remember)
    return asked


async def rows(connection: SqliteConnection, sql: str = "SELECT word FROM words") -> list[Any]:
    return list((await connection.execute(sql)).rows)


async def test_a_statement_is_one_call_to_the_thread(
    connection: SqliteConnection, calls: list[object]
) -> None:
    sql = "INSERT INTO words (word) VALUES (?), (?) RETURNING id, word"
    assert await connection.execute(sql, ("a", "b")) == ([(1, "a"), (2, "b")], 2)
    assert len(calls) == 1


async def test_a_transaction_begins_with_its_first_statement_only(
    connection: SqliteConnection, tmp_path: Path
) -> None:
    await connection.begin()
    await connection.execute("INSERT INTO words (word) VALUES ('a')")
    assert not connection.is_idle
    await connection.commit()
    assert connection.is_idle
    await connection.begin()
    await connection.rollback()
    assert connection.is_idle
    await connection.execute("INSERT INTO words (word) VALUES ('b')")
    assert connection.is_idle
    other = opened(tmp_path / "test.db")
    assert await rows(other) == [("a",), ("b",)]
    await other.close()


async def test_short_statements_need_no_thread_and_commits_do(
    connection: SqliteConnection, calls: list[object]
) -> None:
    await connection.begin()
    written = await connection.execute(
        "INSERT INTO words (word) VALUES (?) RETURNING id", ("a",), is_short=True
    )
    assert written.rows == [(1,)]
    await connection.execute("UPDATE words SET word = 'b'", is_short=True)
    assert not calls
    await connection.commit()
    assert len(calls) == 1
    assert (await connection.execute("SELECT word FROM words", is_short=True)).rows == [("b",)]
    await connection.commit()  # nothing has begun
    await connection.rollback()
    assert len(calls) == 1
    await connection.execute("INSERT INTO words (word) VALUES ('c')", is_short=True)  # it commits by itself
    assert len(calls) == 2


async def test_commits_on_the_loop_leave_checkpoints_to_the_thread(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    sqlite = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    sqlite.execute("PRAGMA journal_mode = WAL")
    sqlite.execute("PRAGMA synchronous = NORMAL")
    connection = SqliteConnection(sqlite, busy_seconds=WAIT_SECONDS, commits_here=True)
    threads = []
    on_thread = connection._on_thread

    async def remember(run: Any) -> Any:
        threads.append(run)
        return await on_thread(run)

    connection._on_thread = remember  # type: ignore[method-assign]
    await connection.execute("CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT)")
    threads.clear()
    text, log = "x" * 40_000, tmp_path / "test.db-wal"
    longest, others = 0, 0

    async def work() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(work())
    for number in range(1, 801):
        await connection.begin()
        await connection.execute("INSERT INTO words (word) VALUES (?)", (text,), is_short=True)
        await connection.commit()
        assert len(threads) == number // 16
        longest = max(longest, log.stat().st_size)
    assert longest < 2 * 1000 * 4096 < 800 * len(text)
    assert others > 800
    beside.cancel()
    # A statement that is its own transaction makes checkpoints again, and so does a transaction with one that
    # is not short.
    for begins in (False, True):
        if begins:
            await connection.begin()
        await connection.execute("INSERT INTO words (word) VALUES ('b')")
        assert (await rows(connection, "PRAGMA wal_autocheckpoint")) == [(1000,)]
        await connection.commit()
    await connection.close()


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
async def test_a_blocked_writer_does_not_block_the_loop(
    connection: SqliteConnection, tmp_path: Path, calls: list[object], lock: str
) -> None:
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute(lock)
    await connection.begin()
    writing = asyncio.create_task(connection.execute("INSERT INTO words (word) VALUES ('a')", is_short=True))
    while not calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)  # the loop runs, and the thread waits
    assert not writing.done()
    other.execute("COMMIT")
    await writing
    await connection.commit()
    assert other.execute("SELECT word FROM words").fetchall() == [("a",)]
    other.close()


async def test_a_blocked_reader_does_not_block_the_loop(
    connection: SqliteConnection, tmp_path: Path, calls: list[object]
) -> None:
    """Without a write-ahead log readers wait for writers, and with one for its recovery."""
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    reading = asyncio.create_task(connection.execute("SELECT count(*) FROM words", is_short=True))
    while not calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert not reading.done()
    other.execute("COMMIT")
    assert (await reading).rows == [(0,)]
    other.close()


async def test_a_lock_is_waited_for_within_the_limit(connection: SqliteConnection, tmp_path: Path) -> None:
    impatient = opened(tmp_path / "test.db", busy_seconds=0.05)
    await connection.begin()
    await connection.execute("INSERT INTO words (word) VALUES ('a')")
    with pytest.raises(StorageUnavailableError, match="database is locked"):
        await impatient.execute("INSERT INTO words (word) VALUES ('b')")
    assert impatient.is_idle
    await impatient.close()


async def test_changed_rows_are_counted(connection: SqliteConnection) -> None:
    await connection.execute("INSERT INTO words (word) VALUES ('a'), ('b'), ('c')")
    assert await connection.execute("UPDATE words SET word = word || '!' WHERE word <> 'b'") == ((), 2)


async def test_a_failed_statement_holds_no_lock(connection: SqliteConnection, tmp_path: Path) -> None:
    with pytest.raises(ConflictError):
        await connection.execute("INSERT INTO words (word) VALUES ('a'), ('a') RETURNING id")
    # An unclosed statement would still read, and keep others from writing.
    other = sqlite3.connect(tmp_path / "test.db", timeout=0)
    other.execute("INSERT INTO words (word) VALUES ('a')")
    other.commit()
    other.close()


async def test_a_cancelled_statement_is_interrupted_and_does_not_disturb_the_next_one(
    connection: SqliteConnection,
) -> None:
    running = asyncio.create_task(connection.execute(LONG))
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running}, timeout=WAIT_SECONDS)
    assert running.cancelled() and connection.is_idle
    assert await rows(connection, "SELECT 7") == [(7,)]


async def test_a_cancelled_statement_rolls_its_transaction_back(connection: SqliteConnection) -> None:
    await connection.begin()
    await connection.execute("INSERT INTO words (word) VALUES ('a')")
    running = asyncio.create_task(connection.execute(f"INSERT INTO words (id, word) SELECT ({LONG}), 'b'"))
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait({running}, timeout=WAIT_SECONDS)
    await connection.rollback()
    assert connection.is_idle
    assert await rows(connection) == []


async def test_a_cancellation_interrupts_no_statement_of_another_caller(connection: SqliteConnection) -> None:
    """Single statements share the writer."""
    running, may_end = threading.Event(), threading.Event()

    def wait() -> int:
        running.set()
        may_end.wait(WAIT_SECONDS)
        return 1

    connection._sqlite.create_function("wait", 0, wait)
    first = asyncio.create_task(connection.execute("SELECT wait()"))
    cancelled = asyncio.create_task(connection.execute("INSERT INTO words (word) VALUES ('cancelled')"))
    last = asyncio.create_task(connection.execute("INSERT INTO words (word) VALUES ('last')"))
    await asyncio.to_thread(running.wait, WAIT_SECONDS)
    cancelled.cancel()
    await asyncio.sleep(0)
    may_end.set()
    assert (await first).rows == [(1,)]
    await last
    assert (await asyncio.gather(cancelled, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    assert await rows(connection) == [("last",)]


async def test_a_connection_closed_twice_concurrently_is_closed_for_both(
    connection: SqliteConnection,
) -> None:
    closing = [asyncio.create_task(connection.close()) for _ in range(2)]
    _, waiting = await asyncio.wait(closing, timeout=WAIT_SECONDS)
    assert not waiting
    assert not connection.is_idle
