"""Frequent queries use an index, whatever the sizes of the tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from storage.engine import Database
from storage.listings.series import SeriesRange
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from storage.tables import ROUNDS
from storage.transaction import Transaction

_SPAN = SeriesRange(
    since=datetime(2026, 5, 4, tzinfo=UTC),
    until=datetime(2026, 5, 5, tzinfo=UTC),
    interval=timedelta(hours=1),
    most_rows=100,
)
QUERIES: dict[str, Callable[[Transaction], Awaitable[object]]] = {
    "ix_rounds_open": lambda tx: tx.rounds.due_chats(limit=5),
    "ix_rounds_open ": lambda tx: tx.rounds.seconds_until_due("chat"),
    "ix_rounds_open  ": lambda tx: _claim(tx),
    "ix_rounds_fair": lambda tx: _acquire_next(tx),
    "ix_rounds_fair ": lambda tx: _request(tx),
    "ix_rounds_fair_owner": lambda tx: _request(tx),
    "ix_rounds_chat_key_sequence": lambda tx: tx.rounds.newest("chat", limit=5),
    "ix_rounds_turn_id": lambda tx: tx.rounds.rounds_of_turns("turn"),
    "ix_rounds_merged_into": lambda tx: tx.rounds.rounds_of_turns("turn"),
    "ix_calls_open": lambda tx: tx.calls.take_unclaimed(waiting_seconds=5, limit=5),
    "ix_calls_open ": lambda tx: tx.calls.sweep_lost(limit=5),
    "ix_calls_open  ": lambda tx: tx.calls.sweep_expired(limit=5),
    "ix_calls_round_id": lambda tx: tx.calls.of_round("round"),
    "ix_messages_chat_key_sequence": lambda tx: tx.messages.newest("chat", limit=5),
    "ix_messages_chat_key_sequence ": lambda tx: tx.messages.after("chat", sequence=3, limit=5),
    "ix_timers_state_fire_at": lambda tx: tx.timers.fire_due(limit=5),
    "ix_cron_jobs_next_fire_at": lambda tx: tx.cron_jobs.due(limit=5),
    "ix_approvals_decided_at": lambda tx: tx.change_listing.approvals(),
    "uq_jobs_open": lambda tx: tx.jobs.take_orphans(waiting_seconds=5, limit=5),
    "ix_rounds_finished_at": lambda tx: tx.series.turns(_SPAN),
    "ix_rounds_turn_id ": lambda tx: tx.series.turns(_SPAN),
    "ix_spendings_created_at": lambda tx: tx.series.spent(_SPAN),
    "ix_plugin_values_plugin_key": lambda tx: _purge(tx),
}


def test_a_new_database_gets_indexes_in_one_order() -> None:
    """Of two that serve a statement equally well, databases use the later one."""
    names = [index.name for index in ROUNDS.indexes]
    assert names[4:6] == ["ix_rounds_turns", "ix_rounds_turn_state"]
    assert names[-3:] == ["ix_rounds_chat_key_sequence", "uq_rounds_running", "ix_rounds_open"]


async def test_states_that_an_index_depends_on_are_no_parameters(
    database: Database, watch_statements: Callable[[Transaction], list[tuple[str, Any]]]
) -> None:
    """SQLite would compile the statement each time that it runs."""
    async with database.begin() as tx:
        statements = watch_statements(tx)
        await _claim(tx)
    _, parameters = statements[-1]
    values = parameters.values() if isinstance(parameters, dict) else parameters
    assert list(values) == ["chat"]


async def _claim(tx: Transaction) -> None:
    await tx.chats.ensure("chat")
    fence = await tx.chats.acquire("chat", owner="w", lease_seconds=60)
    assert fence is not None
    assert await tx.rounds.claim_next("chat", fence=fence, worker="w") is None


async def _acquire_next(tx: Transaction) -> None:
    assert await tx.chats.acquire_next("chat", owner="w", lease_seconds=60) is None


async def _request(tx: Transaction) -> None:
    await tx.chats.ensure("chat")
    request = RoundRequest(chat_key="chat", trigger_kind=TriggerKind.CALL, trigger_id="call")
    assert (await tx.rounds.request(request))[1]


async def _purge(tx: Transaction) -> None:
    await tx.connection.exec_driver_sql("DELETE FROM plugin_values WHERE plugin_key = 'a.b'")


@pytest.mark.parametrize("index", QUERIES)
async def test_query_uses_its_index(
    database: Database, index: str, watch_statements: Callable[[Transaction], list[tuple[str, Any]]]
) -> None:
    async with database.begin() as tx:
        if not database.is_sqlite:
            # Empty tables are scanned faster than any index; forbid it to see what would be used.
            await tx.connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            await tx.connection.exec_driver_sql("SET LOCAL plan_cache_mode = force_generic_plan")
        statements = watch_statements(tx)
        await QUERIES[index](tx)
        statement, parameters = statements[-1]
        explain = "EXPLAIN QUERY PLAN" if database.is_sqlite else "EXPLAIN"
        plan = await tx.connection.exec_driver_sql(f"{explain} {statement}", parameters)
        lines = "\n".join(str(tuple(row)) for row in plan)
    assert index.strip() in lines, lines
