"""The driver that hands each statement to SQLite's thread once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.sqlite_driver import StepConnection, connect


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[StepConnection]:
    made = await connect(str(tmp_path / "test.db"), isolation_level=None)
    await made.cursor().execute("CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT UNIQUE)")
    yield made  # type: ignore[misc]  # awaiting it is typed as the class above it
    await made.close()


async def test_a_statement_is_one_step_with_its_rows(
    connection: StepConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    execute = connection._execute

    async def count(*args: object) -> object:
        nonlocal steps
        steps += 1
        return await execute(*args)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(connection, "_execute", count)
    async with connection.cursor() as cursor:
        await cursor.execute("INSERT INTO words (word) VALUES (?), (?) RETURNING id, word", ("a", "b"))
        assert [column[0] for column in cursor.description or ()] == ["id", "word"]
        assert await cursor.fetchall() == [(1, "a"), (2, "b")]
        assert await cursor.fetchall() == []
        await cursor.close()
    assert steps == 1


async def test_what_precedes_a_statement_is_run_with_it_and_once(
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


async def test_rows_that_changed_are_counted(connection: StepConnection) -> None:
    cursor = connection.cursor()
    await cursor.executemany("INSERT INTO words (word) VALUES (?)", [("a",), ("b",), ("c",)])
    assert cursor.rowcount == 3
    await cursor.execute("UPDATE words SET word = word || '!' WHERE word <> 'b'")
    assert (cursor.rowcount, cursor.description, await cursor.fetchall()) == (2, None, [])
    await cursor.execute("INSERT INTO words (word) VALUES ('d')")
    assert cursor.lastrowid == 4


async def test_an_error_leaves_no_statement_behind_that_holds_a_lock(
    connection: StepConnection, tmp_path: Path
) -> None:
    cursor = connection.cursor()
    with pytest.raises(sqlite3.IntegrityError):
        await cursor.execute("INSERT INTO words (word) VALUES ('a'), ('a') RETURNING id")
    # A statement that was not closed would still read, and keep others from writing.
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
