"""Deletes rows that ended long ago, in small transactions that do not block other writers for long."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, exists, literal, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from broker_config.settings import RetentionSettings
from storage.access.keys import RECURRING
from storage.clock import now, seconds_from_now
from storage.engine import Database
from storage.models import (
    AdapterClientRow,
    AdapterSendRow,
    ApprovalRow,
    AuditRow,
    Base,
    CallRow,
    ChatEventRow,
    ChatSummaryRow,
    CronJobRow,
    JobRow,
    KeyStorageRow,
    KeyTurnRow,
    MessageRow,
    OpenAIResponseRow,
    RequestRow,
    RoundPromptRow,
    RoundRow,
    SpendingRow,
    SpendingTotalRow,
    TimerRow,
    TurnVariablesRow,
    WebhookDeliveryRow,
)
from storage.repositories.leases import is_free
from storage.states import (
    FINAL_CALL_STATES,
    FINAL_JOB_STATES,
    FINAL_ROUND_STATES,
    OPEN_TIMER_STATES,
    StoredKind,
)

__all__ = ["delete_expired"]

#: How long answers to requests with an idempotency key are kept. Clients repeat a request within minutes.
_REQUESTS_KEPT: Final = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    table: type[Base]
    key: tuple[InstrumentedAttribute[Any], ...]
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
            name = rule.table.__tablename__
            deleted[name] = deleted.get(name, 0) + count
    for kind, days in _given_back(retention).items():
        given_back, count = 0, 1
        while count:
            async with database.begin() as tx:
                # A row is of a day, so its last bytes are a day younger than it.
                seconds = timedelta(days=days + 1).total_seconds()
                count = await tx.stored_bytes.give_back_expired(kind, seconds=seconds, limit=batch)
            given_back += count
        name = KeyStorageRow.__tablename__
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
            table=ApprovalRow,
            key=(ApprovalRow.sequence,),
            expired=(ApprovalRow.decided_at < approvals)
            & (ApprovalRow.grant_until.is_(None) | (ApprovalRow.grant_until < now())),
        ),
        _Rule(
            table=CallRow,
            key=(CallRow.id,),
            expired=(CallRow.finished_at < calls) & CallRow.state.in_(FINAL_CALL_STATES),
        ),
        # Also with their round.
        _Rule(table=RoundPromptRow, key=(RoundPromptRow.round_id,), expired=RoundPromptRow.sent_at < prompts),
        _Rule(
            table=RoundRow,
            key=(RoundRow.id,),
            expired=(RoundRow.finished_at < rounds) & RoundRow.state.in_(FINAL_ROUND_STATES),
        ),
        _Rule(
            table=JobRow,
            key=(JobRow.id,),
            expired=(JobRow.updated_at < rounds) & JobRow.state.in_(FINAL_JOB_STATES),
        ),
        _Rule(
            table=TimerRow,
            key=(TimerRow.id,),
            expired=(TimerRow.fire_at < rounds) & TimerRow.state.not_in(OPEN_TIMER_STATES),
        ),
        _Rule(
            table=OpenAIResponseRow,
            key=(OpenAIResponseRow.id,),
            expired=OpenAIResponseRow.created_at < rounds,
        ),
        _Rule(
            table=ChatEventRow,
            key=(ChatEventRow.chat_key, ChatEventRow.number),
            expired=ChatEventRow.created_at < events,
        ),
        # An ended one has a time of its end.
        _Rule(table=AdapterSendRow, key=(AdapterSendRow.id,), expired=AdapterSendRow.finished_at < calls),
        _Rule(
            table=WebhookDeliveryRow,
            key=(WebhookDeliveryRow.id,),
            expired=WebhookDeliveryRow.finished_at < calls,
        ),
        _Rule(
            table=AdapterClientRow,
            key=(AdapterClientRow.id,),
            expired=(AdapterClientRow.seen_at < rounds) & is_free(AdapterClientRow.lease_until),
        ),
    ]
    rules += [
        # Also one that still runs: a gateway that loses its row stores no answer.
        _Rule(table=RequestRow, key=(RequestRow.digest,), expired=RequestRow.created_at < requests),
        _Rule(
            table=KeyTurnRow,
            key=(KeyTurnRow.turn_id,),
            # A timer that has not ended, and a job that runs, may wait for longer.
            expired=(KeyTurnRow.created_at < rounds)
            & ~exists().where(TimerRow.id == KeyTurnRow.turn_id, TimerRow.state.in_(OPEN_TIMER_STATES))
            & ~exists().where(literal(RECURRING) + CronJobRow.job_id == KeyTurnRow.turn_id)
            & ~exists().where(JobRow.id == KeyTurnRow.turn_id, JobRow.state.not_in(FINAL_JOB_STATES)),
        ),
        # The end of a turn deletes them; rounds that a person deleted by hand have none.
        _Rule(
            table=TurnVariablesRow,
            key=(TurnVariablesRow.turn_id,),
            expired=TurnVariablesRow.updated_at < rounds,
        ),
        _Rule(
            table=SpendingRow,
            key=(SpendingRow.id, SpendingRow.part),
            expired=SpendingRow.created_at < rounds,
        ),
        _Rule(
            table=SpendingTotalRow,
            key=(SpendingTotalRow.scope, SpendingTotalRow.period, SpendingTotalRow.id),
            expired=SpendingTotalRow.updated_at < rounds,
        ),
    ]
    if retention.audit_days:
        rules.append(_Rule(table=AuditRow, key=(AuditRow.sequence,), expired=AuditRow.at < audit))
    if retention.messages_days:
        expired = MessageRow.created_at < messages
        rules.append(_Rule(table=MessageRow, key=(MessageRow.id,), expired=expired))
        # A day later than its oldest message: a summary that is made again then lasts for a day at least.
        stale = seconds_from_now(-timedelta(days=retention.messages_days + 1).total_seconds())
        rules.append(
            _Rule(
                table=ChatSummaryRow,
                key=(ChatSummaryRow.chat_key, ChatSummaryRow.version),
                expired=ChatSummaryRow.oldest_at < stale,
            )
        )
    return rules
