"""Deletes rows that ended long ago, in small transactions that do not block other writers for long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Table, delete, exists, literal, select, tuple_

from broker_config.settings import RetentionSettings
from storage.accounts.keys import RECURRING
from storage.engine import Database
from storage.repositories.leases import is_free
from storage.sql import now, seconds_from_now
from storage.states import (
    FINAL_CALL_STATES,
    FINAL_JOB_STATES,
    FINAL_ROUND_STATES,
    OPEN_TIMER_STATES,
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
    IDEMPOTENT_REQUESTS,
    JOBS,
    KEY_STORAGE,
    KEY_TURNS,
    MESSAGES,
    OPENAI_RESPONSES,
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


@dataclass(frozen=True, kw_only=True)
class _Rule:
    table: Table
    key: tuple[ColumnElement[Any], ...]
    expired: ColumnElement[bool]


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
        expired = select(*rule.key).where(rule.expired).limit(batch)
        statement = delete(rule.table).where(tuple_(*rule.key).in_(expired))
        count = batch
        while count == batch:
            async with database.autocommit() as tx:
                count = (await tx.connection.execute(statement)).rowcount
            name = rule.table.name
            deleted[name] = deleted.get(name, 0) + count
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
        StoredKind.ROUNDS: max(retention.rounds_days, retention.events_days),
        StoredKind.PROMPTS: retention.prompts_days,
        StoredKind.CALLS: retention.calls_days,
        StoredKind.REQUESTS: _REQUESTS_KEPT / timedelta(days=1),
        StoredKind.FILES: retention.uploads_days,
    }
    return {kind: kept for kind, kept in days.items() if kept}


def _rules(retention: RetentionSettings) -> list[_Rule]:
    calls = seconds_from_now(-timedelta(days=retention.calls_days).total_seconds())
    rounds = seconds_from_now(-timedelta(days=retention.rounds_days).total_seconds())
    events = seconds_from_now(-timedelta(days=retention.events_days).total_seconds())
    messages = seconds_from_now(-timedelta(days=retention.messages_days).total_seconds())
    prompts = seconds_from_now(-timedelta(days=retention.prompts_days).total_seconds())
    requests = seconds_from_now(-_REQUESTS_KEPT.total_seconds())
    audit = seconds_from_now(-timedelta(days=retention.audit_days).total_seconds())
    approvals = seconds_from_now(-timedelta(days=retention.approvals_days).total_seconds())
    rules = [
        # Only decided ones have a time of the decision; what an approval permits ends before.
        _Rule(
            table=APPROVALS,
            key=(APPROVALS.c.sequence,),
            expired=(APPROVALS.c.decided_at < approvals)
            & (APPROVALS.c.grant_until.is_(None) | (APPROVALS.c.grant_until < now())),
        ),
        _Rule(
            table=CALLS,
            key=(CALLS.c.id,),
            expired=(CALLS.c.finished_at < calls) & CALLS.c.state.in_(FINAL_CALL_STATES),
        ),
        # Also with their round.
        _Rule(
            table=ROUND_PROMPTS, key=(ROUND_PROMPTS.c.round_id,), expired=ROUND_PROMPTS.c.sent_at < prompts
        ),
        _Rule(
            table=ROUNDS,
            key=(ROUNDS.c.id,),
            expired=(ROUNDS.c.finished_at < rounds) & ROUNDS.c.state.in_(FINAL_ROUND_STATES),
        ),
        _Rule(
            table=JOBS,
            key=(JOBS.c.id,),
            expired=(JOBS.c.updated_at < rounds) & JOBS.c.state.in_(FINAL_JOB_STATES),
        ),
        _Rule(
            table=TIMERS,
            key=(TIMERS.c.id,),
            expired=(TIMERS.c.fire_at < rounds) & TIMERS.c.state.not_in(OPEN_TIMER_STATES),
        ),
        _Rule(
            table=OPENAI_RESPONSES,
            key=(OPENAI_RESPONSES.c.id,),
            expired=OPENAI_RESPONSES.c.created_at < rounds,
        ),
        _Rule(
            table=CHAT_EVENTS,
            key=(CHAT_EVENTS.c.chat_key, CHAT_EVENTS.c.number),
            expired=CHAT_EVENTS.c.created_at < events,
        ),
        # An ended one has a time of its end.
        _Rule(table=ADAPTER_SENDS, key=(ADAPTER_SENDS.c.id,), expired=ADAPTER_SENDS.c.finished_at < calls),
        _Rule(
            table=WEBHOOK_DELIVERIES,
            key=(WEBHOOK_DELIVERIES.c.id,),
            expired=WEBHOOK_DELIVERIES.c.finished_at < calls,
        ),
        _Rule(
            table=ADAPTER_CLIENTS,
            key=(ADAPTER_CLIENTS.c.id,),
            expired=(ADAPTER_CLIENTS.c.seen_at < rounds) & is_free(ADAPTER_CLIENTS.c.lease_until),
        ),
    ]
    rules += [
        # Also one that still runs: a gateway that loses its row stores no answer.
        _Rule(
            table=IDEMPOTENT_REQUESTS,
            key=(IDEMPOTENT_REQUESTS.c.digest,),
            expired=IDEMPOTENT_REQUESTS.c.created_at < requests,
        ),
        _Rule(
            table=KEY_TURNS,
            key=(KEY_TURNS.c.turn_id,),
            # A timer that has not ended, and a job that runs, may wait for longer.
            expired=(KEY_TURNS.c.created_at < rounds)
            & ~exists().where(TIMERS.c.id == KEY_TURNS.c.turn_id, TIMERS.c.state.in_(OPEN_TIMER_STATES))
            & ~exists().where(literal(RECURRING) + CRON_JOBS.c.job_id == KEY_TURNS.c.turn_id)
            & ~exists().where(JOBS.c.id == KEY_TURNS.c.turn_id, JOBS.c.state.not_in(FINAL_JOB_STATES)),
        ),
        # The end of a turn deletes them; rounds that a person deleted by hand have none.
        _Rule(
            table=TURN_VARIABLES,
            key=(TURN_VARIABLES.c.turn_id,),
            expired=TURN_VARIABLES.c.updated_at < rounds,
        ),
        _Rule(
            table=SPENDINGS,
            key=(SPENDINGS.c.id, SPENDINGS.c.part),
            expired=SPENDINGS.c.created_at < rounds,
        ),
        _Rule(
            table=SPENDING_TOTALS,
            key=(SPENDING_TOTALS.c.scope, SPENDING_TOTALS.c.period, SPENDING_TOTALS.c.id),
            expired=SPENDING_TOTALS.c.updated_at < rounds,
        ),
    ]
    if retention.audit_days:
        rules.append(_Rule(table=AUDIT, key=(AUDIT.c.sequence,), expired=AUDIT.c.at < audit))
    if retention.messages_days:
        expired = MESSAGES.c.created_at < messages
        rules.append(_Rule(table=MESSAGES, key=(MESSAGES.c.id,), expired=expired))
        # A day later than its oldest message: a summary that is made again then lasts for a day at least.
        stale = seconds_from_now(-timedelta(days=retention.messages_days + 1).total_seconds())
        rules.append(
            _Rule(
                table=CHAT_SUMMARIES,
                key=(CHAT_SUMMARIES.c.chat_key, CHAT_SUMMARIES.c.version),
                expired=CHAT_SUMMARIES.c.oldest_at < stale,
            )
        )
    return rules
