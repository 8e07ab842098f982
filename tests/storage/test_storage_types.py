"""Column types and the database's clock, on both databases."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, MetaData, Table, insert, literal, select
from sqlalchemy.dialects.sqlite import dialect as SQLiteDialect
from sqlalchemy.schema import CreateTable

from nekro_agent.errors import InvalidValueError
from storage.engine import Database
from storage.sql import (
    MAX_KEY_BYTES,
    FaithfulText,
    JsonText,
    KeyText,
    StateText,
    UtcDateTime,
    now,
    seconds_from_now,
)
from storage.states import JobState

SCRATCH = Table(
    "scratch",
    MetaData(),
    Column("text", FaithfulText()),
    Column("key", KeyText()),
    Column("json", JsonText()),
    Column("at", UtcDateTime()),
    Column("state", StateText(JobState)),
)


@pytest.fixture
async def scratch(database: Database) -> Database:
    async with database.begin() as tx:
        create = CreateTable(SCRATCH, if_not_exists=True)
        await tx.connection.exec_driver_sql(str(create.compile(dialect=tx.connection.dialect)))
    return database


async def _round_trip(database: Database, **values: Any) -> Any:
    async with database.begin() as tx:
        await tx.connection.execute(SCRATCH.delete())
        await tx.connection.execute(insert(SCRATCH).values(**values))
        rows = await tx.connection.execute(select(SCRATCH))
    return rows.one()[rows.columns.index(next(iter(values)))]


@pytest.mark.parametrize(
    "text", ["", "plain", "a\0b", "\ud800", "\udfff\ufdd0", "\ufdd00000", "😀\r\n", "\ufdd0" * 3 + "\0"]
)
async def test_text_is_read_back_equal(scratch: Database, text: str) -> None:
    assert await _round_trip(scratch, text=text) == text


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_escaping_is_reversible_and_unambiguous(one: str, other: str) -> None:
    column, dialect = FaithfulText(), SQLiteDialect()
    unescape = column.result_processor(dialect, None)
    escaped = column.process_bind_param(one, dialect)
    assert escaped is not None
    escaped.encode()
    assert "\0" not in escaped
    assert unescape(escaped) == one
    assert (escaped == column.process_bind_param(other, dialect)) == (one == other)


async def test_key_at_the_limit_is_stored_and_a_longer_one_refused(scratch: Database) -> None:
    key = "é" * (MAX_KEY_BYTES // 2)
    assert await _round_trip(scratch, key=key) == key
    with pytest.raises(InvalidValueError, match=f"{MAX_KEY_BYTES + 1} bytes; the limit is {MAX_KEY_BYTES}"):
        await _round_trip(scratch, key=key + "x")


@pytest.mark.parametrize("value", [{"a": [1, None, "\0\ud800"]}, [], 0, False, "x", {"big": 2**70}])
async def test_json_is_read_back_equal(scratch: Database, value: Any) -> None:
    assert await _round_trip(scratch, json=value) == value


async def test_json_preserves_nan(scratch: Database) -> None:
    assert math.isnan(await _round_trip(scratch, json=math.nan))


async def test_invalid_json_is_refused_by_name(scratch: Database) -> None:
    with pytest.raises(InvalidValueError, match=r"cannot be stored as JSON: .*bytes"):
        await _round_trip(scratch, json={"raw": b"x"})


@settings(max_examples=10)
@given(at=st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2900, 1, 1)))
async def test_times_are_read_back_in_utc(scratch: Database, at: datetime) -> None:
    aware = at.replace(tzinfo=timezone(timedelta(hours=5, minutes=45)))
    stored = await _round_trip(scratch, at=aware)
    assert stored == aware
    assert stored.tzinfo is UTC


async def test_naive_time_is_refused(scratch: Database) -> None:
    with pytest.raises(InvalidValueError, match="naive"):
        await _round_trip(scratch, at=datetime(2030, 1, 1))


async def test_state_is_read_back_as_its_member(scratch: Database) -> None:
    assert await _round_trip(scratch, state=JobState.RUNNING) is JobState.RUNNING


async def test_database_clock_compares_with_stored_times(scratch: Database) -> None:
    await _round_trip(scratch, at=datetime.now(UTC) - timedelta(hours=1))
    async with scratch.read() as tx:
        row = (
            await tx.connection.execute(
                select(
                    SCRATCH.c.at < now(),
                    SCRATCH.c.at < seconds_from_now(-7200),
                    now() < seconds_from_now(0.5),
                    seconds_from_now(1e-9) <= seconds_from_now(0.002),
                    literal(datetime.now(UTC) - timedelta(minutes=1), UtcDateTime()) < now(),
                    now(),
                )
            )
        ).one()
    assert tuple(map(bool, row[:5])) == (True, False, True, True, True)
    assert abs((row[5] - datetime.now(UTC)).total_seconds()) < 60


async def test_values_beside_a_list_of_values_are_converted(scratch: Database) -> None:
    """They went to the driver as they are: a time with its offset compares wrongly as a text of SQLite."""
    at = datetime(2026, 5, 4, 12, tzinfo=timezone(timedelta(hours=2)))
    row = {"text": "a\0b", "key": "k", "json": None, "at": at, "state": JobState.RUNNING}
    async with scratch.begin() as tx:
        await tx.connection.execute(insert(SCRATCH).values(**row))
    beside = select(SCRATCH.c.key).where(SCRATCH.c.key.in_(["k", "l"]))
    async with scratch.read() as tx:
        for condition in (SCRATCH.c.at == at, SCRATCH.c.text == "a\0b", SCRATCH.c.state == JobState.RUNNING):
            assert (await tx.connection.execute(beside.where(condition))).all() == [("k",)]
