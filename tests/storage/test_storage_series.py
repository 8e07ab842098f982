"""Figures over time, from rounds and entries of what was spent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from storage.engine import Database
from storage.listings.series import SeriesRange
from storage.sql import insert
from storage.states import RoundState, TriggerKind
from storage.tables import KEY_TURNS, ROUNDS, SPENDINGS
from storage.transaction import Transaction

BEGIN = datetime(2026, 5, 4, tzinfo=UTC)
HOUR = timedelta(hours=1)
SPAN = SeriesRange(since=BEGIN, until=BEGIN + 3 * HOUR, interval=HOUR, most_rows=100)


async def add_round(
    tx: Transaction,
    turn: str,
    ended: timedelta | None,
    *,
    lasted: float = 1.0,
    number: int = 1,
    state: RoundState = RoundState.DONE,
) -> None:
    """Add a round that ends so long after ``BEGIN``; its turn's first one is requested ``lasted`` before."""
    at = None if ended is None else BEGIN + ended
    name = turn if number == 1 else f"{turn}-{number}"
    begun = (at or BEGIN) - timedelta(seconds=lasted)
    values = {
        "id": name, "chat_key": "chat", "turn_id": turn, "number": number, "state": state,
        "trigger_kind": TriggerKind.MESSAGE, "trigger_id": name, "requested_at": begun, "not_before": begun,
        "finished_at": at, "attempt": 1, "fence": 1,
    }  # fmt: skip
    await tx.connection.execute(insert(tx.connection.dialect.name, ROUNDS).values(**values))


async def add_chat(tx: Transaction) -> None:
    await tx.chats.ensure("chat")


async def add_spent(tx: Transaction, name: str, at: timedelta, *, key_id: str | None = None) -> None:
    values = {
        "id": name, "part": 0, "day": "2026-05-04", "key_id": key_id, "model_group": "g", "model": "m",
        "rounds": 1, "requests": 2, "prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25,
        "sandbox_seconds": 0.0, "created_at": BEGIN + at,
    }  # fmt: skip
    await tx.connection.execute(insert(tx.connection.dialect.name, SPENDINGS).values(**values))


async def test_turns_count_where_they_end_with_their_states_and_percentiles(database: Database) -> None:
    async with database.begin() as tx:
        await add_chat(tx)
        for number in range(1, 21):  # 1 to 20 seconds
            await add_round(tx, f"t{number}", timedelta(minutes=number), lasted=number)
        await add_round(tx, "failed", HOUR, lasted=0.25, state=RoundState.FAILED)
        await add_round(tx, "stopped", 2 * HOUR - timedelta(microseconds=1000), state=RoundState.CANCELLED)
        await add_round(tx, "before", timedelta(seconds=-1))
        await add_round(tx, "after", 3 * HOUR)
        points = await tx.series.turns(SPAN)
    first, second = points
    assert (first.number, first.turns, first.failed, first.cancelled) == (0, 20, 0, 0)
    assert (first.turn_p50_ms, first.turn_p95_ms) == (10_000, 19_000)
    assert (second.number, second.turns, second.failed, second.cancelled) == (1, 2, 1, 1)
    assert (second.turn_p50_ms, second.turn_p95_ms) == (250, 1000)


async def test_a_turn_ends_with_its_last_round_and_an_open_or_merged_one_does_not_count(
    database: Database,
) -> None:
    async with database.begin() as tx:
        await add_chat(tx)
        await add_round(tx, "long", timedelta(minutes=10), lasted=600)
        await add_round(tx, "long", HOUR, number=2, state=RoundState.FAILED)
        await add_round(tx, "open", timedelta(minutes=20))
        await add_round(tx, "open", None, number=2, state=RoundState.REQUESTED)
        await add_round(tx, "merged", timedelta(minutes=30), state=RoundState.MERGED)
        (point,) = await tx.series.turns(SPAN)
    assert (point.number, point.turns, point.failed, point.turn_p50_ms) == (1, 1, 1, 3_600_000)


async def test_what_was_spent_is_summed_up_per_interval_and_for_one_key(database: Database) -> None:
    async with database.begin() as tx:
        await add_chat(tx)
        await add_spent(tx, "a", timedelta(0), key_id="k")
        await add_spent(tx, "b", timedelta(minutes=59))
        await add_spent(tx, "c", 2 * HOUR)
        await add_spent(tx, "d", 3 * HOUR)
        for turn in ("mine", "other"):
            await add_round(tx, turn, timedelta(minutes=5))
        key = insert(tx.connection.dialect.name, KEY_TURNS)
        await tx.connection.execute(key.values(turn_id="mine", key_id="k", created_at=BEGIN))
        points = await tx.series.spent(SPAN)
        (own,) = await tx.series.spent(SPAN, key_id="k")
        (turns,) = await tx.series.turns(SPAN, key_id="k")
    names = ("number", "requests", "prompt_tokens", "completion_tokens", "cost")
    found = [tuple(getattr(one, name) for name in names) for one in points]
    assert found == [(0, 4, 20, 10, 0.5), (2, 2, 10, 5, 0.25)]
    assert (own.number, own.cost, turns.turns) == (0, 0.25, 1)


async def test_only_the_newest_rows_are_read_and_their_oldest_is_named(database: Database) -> None:
    few = SeriesRange(since=SPAN.since, until=SPAN.until, interval=HOUR, most_rows=2)
    async with database.begin() as tx:
        await add_chat(tx)
        for hour in range(3):
            await add_round(tx, f"t{hour}", hour * HOUR)
            await add_spent(tx, f"e{hour}", hour * HOUR)
        turns, spent = await tx.series.turns(few), await tx.series.spent(few)
    for points in (turns, spent):
        assert [one.number for one in points] == [1, 2]
        assert {(one.rows, one.oldest) for one in points} == {(2, BEGIN + HOUR)}
