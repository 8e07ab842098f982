"""Deletes rows that ended long ago, in small transactions that do not block other writers for long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    CompoundSelect,
    delete,
    exists,
    false,
    func,
    literal,
    select,
    tuple_,
    union,
)

from broker_config.settings import RetentionSettings
from storage.engine import Database
from storage.repositories.base import is_one_of
from storage.repositories.leases import is_free
from storage.sql import now, seconds_from_now
from storage.states import (
    FINAL_CALL_STATES,
    FINAL_JOB_STATES,
    FINAL_ROUND_STATES,
    OPEN_TIMER_STATES,
    RECURRING,
    RoundState,
    StoredKind,
)
from storage.tables import (
    ADAPTER_CLIENTS,
    ADAPTER_SENDS,
    APPROVALS,
    AUDIT,
    CALLS,
    CHAT_EVENTS,
    CHAT_SUMMARIES,
    CRON_JOBS,
    FILE_ENTRIES,
    IDEMPOTENT_REQUESTS,
    JOBS,
    KEY_STORAGE,
    KEY_TURNS,
    MESSAGES,
    OPENAI_RESPONSES,
    PARKED_PROGRAMS,
    ROUND_PROMPTS,
    ROUNDS,
    SPENDING_TOTALS,
    SPENDINGS,
    TIMERS,
    TURN_VARIABLES,
    WEBHOOK_DELIVERIES,
)

__all__ = ["delete_expired"]

#: How long answers to requests with an idempotency key are kept. Clients repeat a request within minutes.
_REQUESTS_KEPT: Final = timedelta(days=1)


@dataclass(frozen=True)
class _Rule:
    """Rows are deleted when a time of theirs is some days old, under a condition."""

    at: Column[Any]
    days: float
    condition: ColumnElement[bool] | None = None


async def delete_expired(
    database: Database, retention: RetentionSettings, *, batch: int = 500
) -> dict[str, int]:
    """Delete rows whose retention period is over; returns the number of rows per table.

    Open rows, chats, plugin values and recurring timers are never deleted.

    Args:
        batch: rows per transaction.
    """
    deleted: dict[str, int] = {}
    for rule in _rules(retention):
        table, key = rule.at.table, rule.at.table.primary_key.columns
        expired = select(*key).where(rule.at < _days_ago(rule.days)).limit(batch)
        if rule.condition is not None:
            expired = expired.where(rule.condition)
        statement = delete(table).where(tuple_(*key).in_(expired))
        count = batch
        while count == batch:
            async with database.autocommit() as tx:
                count = (await tx.connection.execute(statement)).rowcount
            deleted[table.name] = deleted.get(table.name, 0) + count
    for kind, days in _given_back(retention).items():
        given_back, count = 0, 1
        while count:
            async with database.begin() as tx:
                # A row is of a day, so its last bytes are a day younger than it.
                seconds = timedelta(days=days + 1).total_seconds()
                count = await tx.stored_bytes.give_back_expired(kind, seconds=seconds, limit=batch)
            given_back += count
        name = KEY_STORAGE.name
        deleted[name] = deleted.get(name, 0) + given_back
    return deleted


def _given_back(retention: RetentionSettings) -> dict[StoredKind, float]:
    """Return after how many days keys get back what they stored; what is kept forever is missing."""
    days = {
        StoredKind.MESSAGES: retention.messages_days,
        StoredKind.ROUNDS: retention.rounds_days,
        StoredKind.PROMPTS: retention.prompts_days,
        StoredKind.CALLS: retention.calls_days,
        StoredKind.REQUESTS: _REQUESTS_KEPT / timedelta(days=1),
        StoredKind.FILES: retention.uploads_days,
    }
    return {kind: kept for kind, kept in days.items() if kept}


def _days_ago(days: float) -> ColumnElement[datetime]:
    return seconds_from_now(-timedelta(days=days).total_seconds())


def _unfinished_programs() -> CompoundSelect[Any]:
    """Select the programs that are or may be run again: they wait, or a call or round of theirs goes on."""
    rounds, calls = ROUNDS.alias(), CALLS.alias()
    waits = select(PARKED_PROGRAMS.c.program_id).where(PARKED_PROGRAMS.c.until.is_not(None))
    # An approved call requests the round when it ends.
    awaited = select(PARKED_PROGRAMS.c.program_id).join(calls, calls.c.id == PARKED_PROGRAMS.c.call_id)
    open_rounds = select(func.coalesce(rounds.c.program_id, rounds.c.id))
    return union(
        waits,
        awaited.where(calls.c.state.not_in(FINAL_CALL_STATES)),
        open_rounds.where(is_one_of(rounds.c.state, RoundState.REQUESTED, RoundState.RUNNING)),
    )


def _is_of_unfinished_program() -> ColumnElement[bool]:
    went_on = select(ROUNDS.c.id).where(ROUNDS.c.program_id.in_(_unfinished_programs()))
    is_of_one = CALLS.c.round_id.in_(_unfinished_programs()) | CALLS.c.round_id.in_(went_on)
    return func.coalesce(is_of_one, false())


def _rules(retention: RetentionSettings) -> list[_Rule]:
    """Return the rules in the order in which they delete."""
    calls, rounds = retention.calls_days, retention.rounds_days
    rules = [
        # Only decided ones have a time of the decision; what an approval permits ends before.
        _Rule(
            APPROVALS.c.decided_at,
            retention.approvals_days,
            APPROVALS.c.grant_until.is_(None) | (APPROVALS.c.grant_until < now()),
        ),
        # A program that is run again needs what its calls returned, and its first round.
        _Rule(
            CALLS.c.finished_at, calls, CALLS.c.state.in_(FINAL_CALL_STATES) & ~_is_of_unfinished_program()
        ),
        # Also with their round.
        _Rule(ROUND_PROMPTS.c.sent_at, retention.prompts_days),
        _Rule(
            ROUNDS.c.finished_at,
            rounds,
            ROUNDS.c.state.in_(FINAL_ROUND_STATES) & ROUNDS.c.id.not_in(_unfinished_programs()),
        ),
        _Rule(JOBS.c.updated_at, rounds, JOBS.c.state.in_(FINAL_JOB_STATES)),
        _Rule(TIMERS.c.fire_at, rounds, TIMERS.c.state.not_in(OPEN_TIMER_STATES)),
        _Rule(OPENAI_RESPONSES.c.created_at, rounds),
        _Rule(CHAT_EVENTS.c.created_at, rounds),
        # Of files that were changed or deleted; present ones have no end.
        _Rule(FILE_ENTRIES.c.ended_at, rounds),
        # An ended one has a time of its end.
        _Rule(ADAPTER_SENDS.c.finished_at, calls),
        _Rule(WEBHOOK_DELIVERIES.c.finished_at, calls),
        _Rule(ADAPTER_CLIENTS.c.seen_at, rounds, is_free(ADAPTER_CLIENTS.c.lease_until)),
        # Also one that still runs: a gateway that loses its row stores no answer.
        _Rule(IDEMPOTENT_REQUESTS.c.created_at, _REQUESTS_KEPT / timedelta(days=1)),
        # A timer that has not ended, and a job that runs, may wait for longer.
        _Rule(
            KEY_TURNS.c.created_at,
            rounds,
            ~exists().where(TIMERS.c.id == KEY_TURNS.c.turn_id, TIMERS.c.state.in_(OPEN_TIMER_STATES))
            & ~exists().where(literal(RECURRING) + CRON_JOBS.c.job_id == KEY_TURNS.c.turn_id)
            & ~exists().where(JOBS.c.id == KEY_TURNS.c.turn_id, JOBS.c.state.not_in(FINAL_JOB_STATES)),
        ),
        # The end of a turn deletes them; rounds that a person deleted by hand have none.
        _Rule(TURN_VARIABLES.c.updated_at, rounds),
        _Rule(SPENDINGS.c.created_at, rounds),
        _Rule(SPENDING_TOTALS.c.updated_at, rounds),
    ]
    if retention.audit_days:
        rules.append(_Rule(AUDIT.c.at, retention.audit_days))
    if retention.messages_days:
        rules.append(_Rule(MESSAGES.c.created_at, retention.messages_days))
        # A day later than its oldest message: a summary that is made again then lasts for a day at least.
        rules.append(_Rule(CHAT_SUMMARIES.c.oldest_at, retention.messages_days + 1))
    return rules
