"""The driver that passes each statement to SQLite's thread once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS

from storage.driver.sqlite_driver import StepConnection, connect


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[StepConnection]:
    made = await connect(str(tmp_path / "test.db"), isolation_level=None)
    await made.cursor().execute("CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT UNIQUE)")
    yield made  # type: ignore[misc]  # awaiting it is typed as the class above it
    await made.close()


@pytest.fixture
def steps(connection: StepConnection, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Requests to the connection's thread so far."""
    asked: list[object] = []
    execute = connection._execute

    async def remember(step: Callable[[], object]) -> object:
        asked.append(step)
        return await execute(step)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(connection, "_execute", remember)
    return asked


async def test_a_statement_is_one_step_with_its_rows(connection: StepConnection, steps: list[object]) -> None:
    async with connection.cursor() as cursor:
        await cursor.execute("INSERT INTO words (word) VALUES (?), (?) RETURNING id, word", ("a", "b"))
        assert [column[0] for column in cursor.description or ()] == ["id", "word"]
        assert await cursor.fetchall() == [(1, "a"), (2, "b")]
        assert await cursor.fetchall() == []
        await cursor.close()
    assert len(steps) == 1


async def test_preceding_statements_run_with_a_statement_and_once(
    connection: StepConnection, tmp_path: Path
) -> None:
    connection.precede = "BEGIN IMMEDIATE"
    cursor = connection.cursor()
    await cursor.execute("INSERT INTO words (word) VALUES ('a')")
    assert connection.in_transaction
    await cursor.execute("COMMIT")
    await cursor.execute("INSERT INTO words (word) VALUES ('b')")
    assert not connection.in_transaction
    other = sqlite3.connect(tmp_path / "test.db", timeout=0, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await cursor.execute("PRAGMA busy_timeout = 0")
    connection.precede = "BEGIN IMMEDIATE"
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await cursor.execute("SELECT word FROM words")
    await cursor.execute("SELECT word FROM words")
    assert await cursor.fetchall() == [("a",), ("b",)]
    other.close()


async def test_small_statements_need_no_thread_and_commits_do(
    connection: StepConnection, steps: list[object]
) -> None:
    connection.precede = "BEGIN IMMEDIATE"
    written = await connection.execute("INSERT INTO words (word) VALUES (?) RETURNING id", ("a",))
    assert await written.fetchall() == [(1,)]
    await connection.execute("UPDATE words SET word = 'b'")
    assert not steps
    await connection.commit()
    assert len(steps) == 1
    assert await (await connection.execute("SELECT word FROM words")).fetchall() == [("b",)]
    await connection.commit()  # nothing has begun
    await connection.rollback()
    assert len(steps) == 1
    await connection.execute("INSERT INTO words (word) VALUES ('c')")  # it commits by itself
    assert len(steps) == 2


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
async def test_a_blocked_writer_does_not_block_the_loop(
    connection: StepConnection, tmp_path: Path, steps: list[object], lock: str
) -> None:
    await connection.cursor().execute("PRAGMA busy_timeout = 20000")
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute(lock)
    connection.precede = "BEGIN IMMEDIATE"
    writing = asyncio.create_task(connection.execute("INSERT INTO words (word) VALUES ('a')"))
    while len(steps) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)  # the loop runs, and the thread waits
    assert not writing.done()
    other.execute("COMMIT")
    await writing
    assert connection.in_transaction
    await connection.commit()
    assert other.execute("SELECT word FROM words").fetchall() == [("a",)]
    other.close()


async def test_a_blocked_reader_does_not_block_the_loop(
    connection: StepConnection, tmp_path: Path, steps: list[object]
) -> None:
    """Without a write-ahead log readers wait for writers, and with one for its recovery."""
    await connection.cursor().execute("PRAGMA busy_timeout = 20000")
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    reading = asyncio.create_task(connection.execute("SELECT count(*) FROM words"))
    while len(steps) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert not reading.done()
    other.execute("COMMIT")
    assert await (await reading).fetchall() == [(0,)]
    other.close()


async def test_a_refused_statement_leaves_the_limit_unchanged(
    connection: StepConnection, steps: list[object]
) -> None:
    await connection.cursor().execute("PRAGMA busy_timeout = 777")
    steps.clear()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await connection.execute("SELECT 1 FROM nowhere")
    connection.precede = "BEGIN IMMEDIATE"
    with pytest.raises(sqlite3.IntegrityError):
        await connection.execute("INSERT INTO words (id, word) VALUES (1, 'a'), (1, 'b')")
    assert connection.in_transaction
    assert not steps
    limit = await connection.execute("SELECT * FROM pragma_busy_timeout")
    assert await limit.fetchall() == [(777,)]
    await connection.rollback()


async def test_changed_rows_are_counted(connection: StepConnection) -> None:
    cursor = connection.cursor()
    await cursor.executemany("INSERT INTO words (word) VALUES (?)", [("a",), ("b",), ("c",)])
    assert cursor.rowcount == 3
    await cursor.execute("UPDATE words SET word = word || '!' WHERE word <> 'b'")
    assert (cursor.rowcount, cursor.description, await cursor.fetchall()) == (2, None, [])
    await cursor.execute("INSERT INTO words (word) VALUES ('d')")
    assert cursor.lastrowid == 4


async def test_a_failed_statement_holds_no_lock(connection: StepConnection, tmp_path: Path) -> None:
    cursor = connection.cursor()
    with pytest.raises(sqlite3.IntegrityError):
        await cursor.execute("INSERT INTO words (word) VALUES ('a'), ('a') RETURNING id")
    # An unclosed statement would still read, and keep others from writing.
    other = sqlite3.connect(tmp_path / "test.db", timeout=0)
    other.execute("INSERT INTO words (word) VALUES ('a')")
    other.commit()
    other.close()


async def test_a_cancelled_statement_does_not_disturb_the_next_one(connection: StepConnection) -> None:
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)"
    running = asyncio.create_task(connection.cursor().execute(f"{numbers} SELECT sum(i) FROM n"))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    cursor = connection.cursor()
    await cursor.execute("SELECT 7")
    assert await cursor.fetchall() == [(7,)]


async def test_a_connection_closed_twice_concurrently_is_closed_for_both(connection: StepConnection) -> None:
    closing = [asyncio.create_task(connection.close()) for _ in range(2)]
    _, waiting = await asyncio.wait(closing, timeout=WAIT_SECONDS)
    assert not waiting
