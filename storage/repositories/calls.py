"""Calls of plugin methods: claimed before they run, so that each has at most one effect.

    AWAITING ──(approved)──▶ QUEUED; ──(not approved)──▶ FAILED or CANCELLED
    QUEUED ──claim──▶ RUNNING ──finish──▶ DONE      ──fail──▶ FAILED
       │                 ├──(lease expired)──▶ UNKNOWN, or RUNNING again if it is repeatable
       ├─────────────────┴──cancel──▶ CANCELLED
       └──expire──▶ FAILED

A claim inserts the row if there is none: only calls that must survive the loss of the broker are
recorded before they are published.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, Select, and_, bindparam, func, or_, select, update

from nekro_agent.errors import FencedError
from nekro_agent.methods import SandboxMethodType
from storage.driver.statements import FixedStatement, ListStatement
from storage.repositories.base import Repository, chosen_once, found, is_one_of, parameters_of, values_of
from storage.repositories.leases import LeaseTable, is_free
from storage.sql import insert, now, seconds_from_now, seconds_parameter
from storage.states import CallState
from storage.tables import CALLS, ROUNDS

__all__ = ["CALL_CLAIMS", "Call", "CallRepository", "CallRequest", "Claim", "ClaimVerdict"]

CALL_CLAIMS: Final = LeaseTable(
    key=CALLS.c.id,
    fence=CALLS.c.fence,
    is_live=(CALLS.c.state == CallState.RUNNING) & CALLS.c.lease_until.is_not(None),
)
_OPEN: Final = (CallState.QUEUED, CallState.RUNNING)
#: Added to the age of the first claim attempt: the time that a statement takes to reach the database.
_ASK_MARGIN_SECONDS: Final = 1.0
#: Later than any start: there was no earlier attempt.
_NEVER_SECONDS: Final = 1e6
_UNKNOWN_MESSAGE: Final = "its worker died inside it; the effect may or may not have happened"


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """A call as its caller requested it."""

    id: str
    method: str
    type: SandboxMethodType
    chat_key: str
    round_id: str | None = None
    lane: str | None = None
    #: Whether it may run again when its worker died while running it.
    repeatable: bool = False
    deadline: datetime | None = None
    #: The message's body, to publish it again; None when the broker's copy is enough.
    invocation: dict[str, Any] | None = None
    #: What its program read before it, as the note of ``nekro.broker.program_calls``; None: nothing.
    readings: str | None = None


@dataclass(frozen=True, kw_only=True)
class Call(CallRequest):
    """A recorded call."""

    state: CallState
    #: Claims so far.
    fence: int
    worker: str | None
    lease_until: datetime | None
    requested_at: datetime
    published_at: datetime | None
    #: Since when the caller no longer waits for the result, which goes to the chat; None while it waits.
    detached_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    #: Result of the first delivery, for repeated deliveries.
    outcome: dict[str, Any] | None
    error_type: str | None
    error_message: str | None


class ClaimVerdict(StrEnum):
    """What a worker must do with a delivery."""

    #: Run the method, then ``finish`` or ``fail`` with the claim's fence.
    GRANTED = "granted"
    #: The call has ended: answer with its recorded outcome.
    ENDED = "ended"
    #: Another delivery of the call is running: do nothing.
    BUSY = "busy"
    #: A worker died while running the call: answer "outcome unknown".
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The result of a claim attempt."""

    verdict: ClaimVerdict
    #: Fencing token when granted, else 0.
    fence: int = 0
    #: The call as recorded, unless granted.
    call: Call | None = None


class CallRepository(Repository):
    """Rows of calls; see the module for the states."""

    async def enqueue(self, request: CallRequest) -> bool:
        """Record a call before it is published; False when it is recorded already."""
        return await self._scalar(_enqueue_statement, values_of(request, CallRequest)) is not None

    async def keep_message(
        self, call_id: str, invocation: dict[str, Any], *, readings: str | None = None
    ) -> None:
        """Store the message of an open call, so that it can be published again."""
        await self._count(
            update(CALLS)
            .where(CALLS.c.id == call_id, is_one_of(CALLS.c.state, *_OPEN))
            .values(invocation=invocation, readings=func.coalesce(CALLS.c.readings, readings))
        )

    async def claim(
        self,
        request: CallRequest,
        *,
        worker: str,
        lease_seconds: float,
        since_seconds: float | None = None,
    ) -> Claim:
        """Claim the right to run a call; at most one delivery of a call id holds it.

        A granted claim takes one statement, so call it in ``Database.autocommit``.

        Args:
            lease_seconds: how long the claim lasts without ``renew``; the time to the call's
                deadline if it is not renewed.
            since_seconds: how long ago this worker first tried to claim; None for a first attempt. A
                claim by this worker since then is one whose confirmation was lost; it is granted again.
        """
        asked_seconds = _NEVER_SECONDS if since_seconds is None else -since_seconds - _ASK_MARGIN_SECONDS
        values = {
            **values_of(request, CallRequest),
            "worker": worker,
            "lease_seconds": lease_seconds,
            "asked_seconds": asked_seconds,
        }
        fence = await self._scalar(_claim_statement, values)
        if fence is not None:
            return Claim(verdict=ClaimVerdict.GRANTED, fence=fence)
        lost = await self._one_or_none(
            Call,
            update(CALLS)
            .where(CALLS.c.id == request.id, _is_orphan(), ~CALLS.c.repeatable)
            .values(**_unknown())
            .returning(CALLS),
        )
        call = lost or await self.get(request.id)
        return Claim(verdict=_verdict(call.state), call=call)

    async def finish(self, call_id: str, *, fence: int, outcome: dict[str, Any] | None) -> Call:
        """Record what the method returned; call it in the same transaction as its effects in SQL.

        Raises:
            FencedError: the claim was lost, or the call was cancelled; roll back.
        """
        return await self._end(call_id, fence, CallState.DONE, outcome=outcome)

    async def fail(self, call_id: str, *, fence: int, error_type: str, error_message: str) -> Call:
        """Record that the method raised.

        Raises:
            FencedError: the claim was lost, or the call was cancelled.
        """
        return await self._end(
            call_id, fence, CallState.FAILED, error_type=error_type, error_message=error_message
        )

    async def withdraw(self, request: CallRequest, *, reason: str) -> Call:
        """Cancel a call that no worker has claimed, even before it is recorded; returns its current row.

        A row exists afterwards in any case, so that a message or an INSERT that is still in flight does
        not start the call.
        """
        cancelled = _cancelled(reason)
        new = insert(self._dialect, CALLS).values(
            **values_of(request, CallRequest), **cancelled, requested_at=now()
        )
        statement = new.on_conflict_do_update(
            index_elements=[CALLS.c.id], set_=cancelled, where=CALLS.c.state == CallState.QUEUED
        ).returning(CALLS)
        return await self._one_or_none(Call, statement) or await self.get(request.id)

    async def cancel(self, call_id: str, *, reason: str) -> Call | None:
        """Cancel an open call, so that its later results are refused; None if the call is not open."""
        statement = update(CALLS).where(CALLS.c.id == call_id, is_one_of(CALLS.c.state, *_OPEN))
        return await self._one_or_none(Call, statement.values(**_cancelled(reason)).returning(CALLS))

    async def cancel_round(self, round_id: str, *, reason: str) -> list[Call]:
        """Cancel the open calls of a round; returns them so that the caller can revoke them."""
        statement = update(CALLS).where(CALLS.c.round_id == round_id, is_one_of(CALLS.c.state, *_OPEN))
        return await self._all(Call, statement.values(**_cancelled(reason)).returning(CALLS))

    async def take_unclaimed(self, *, waiting_seconds: float, limit: int) -> list[Call]:
        """Return calls to publish again: unclaimed for ``waiting_seconds``, or repeatable with a dead worker.

        Later sweeps skip them for another ``waiting_seconds``.
        """
        is_stale = and_(
            CALLS.c.state == CallState.QUEUED, CALLS.c.published_at < seconds_from_now(-waiting_seconds)
        )
        is_repeated = and_(
            _is_orphan(),
            CALLS.c.repeatable,
            or_(CALLS.c.published_at.is_(None), CALLS.c.published_at < seconds_from_now(-waiting_seconds)),
        )
        chosen = _open_calls(or_(is_stale, is_repeated), limit).where(
            CALLS.c.invocation.is_not(None), or_(CALLS.c.deadline.is_(None), CALLS.c.deadline > now())
        )
        return await self._update_chosen(chosen, {"published_at": now()})

    async def end_claims(self, worker: str) -> int:
        """End the claims of a worker that is known to be dead at once; returns how many."""
        statement = (
            update(CALLS)
            .where(CALLS.c.state == CallState.RUNNING, CALLS.c.worker == worker, CALLS.c.lease_until > now())
            .values(lease_until=None)  # a renewal that the worker had sent must not revive the claim
        )
        return await self._count(statement)

    async def sweep_lost(self, *, limit: int) -> list[Call]:
        """End calls whose worker died as UNKNOWN; returns them, so that their chats can be notified.

        A repeatable call may run again until its deadline, and ends then.
        """
        chosen = _open_calls(and_(_is_orphan(), or_(~CALLS.c.repeatable, CALLS.c.deadline <= now())), limit)
        return await self._update_chosen(chosen, _unknown())

    async def sweep_expired(self, *, limit: int) -> list[Call]:
        """Fail calls that were not claimed before their deadline; they will not start any more."""
        chosen = _open_calls(and_(CALLS.c.state == CallState.QUEUED, CALLS.c.deadline < now()), limit)
        error = {"error_type": "CallTimeoutError", "error_message": "it did not start before its deadline"}
        return await self._update_chosen(chosen, {"state": CallState.FAILED, "finished_at": now(), **error})

    async def find(self, call_id: str) -> Call | None:
        """Return the call, or None."""
        return await self._one_or_none(Call, select(CALLS).where(CALLS.c.id == call_id))

    async def find_all(self, call_ids: Collection[str]) -> dict[str, Call]:
        """Return the existing calls by id."""
        if not call_ids:
            return {}
        found = await self._all(Call, _listed_statement(), {"ids": list(call_ids)})
        return {call.id: call for call in found}

    async def get(self, call_id: str) -> Call:
        """Return the call.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(call_id), "call", call_id)

    async def of_round(self, round_id: str) -> list[Call]:
        """List a round's recorded calls, in the order of their requests."""
        return await self._all(Call, _of_round_statement, {"of_round": round_id})

    async def of_program(self, program_id: str) -> list[Call]:
        """List the recorded calls of a program, in the order of their requests.

        Args:
            program_id: the round whose answer it is; further rounds may have gone on with it.
        """
        rounds = select(ROUNDS.c.id).where(ROUNDS.c.program_id == program_id)
        is_own = or_(CALLS.c.round_id == program_id, CALLS.c.round_id.in_(rounds))
        return await self._all(Call, select(CALLS).where(is_own).order_by(CALLS.c.requested_at, CALLS.c.id))

    async def _end(
        self,
        call_id: str,
        fence: int,
        state: CallState,
        *,
        outcome: dict[str, Any] | None = None,
        error_type: str | None = None,
        error_message: str | None = None,
    ) -> Call:
        values = {
            "of_call": call_id,
            "of_fence": fence,
            "new_state": state,
            "new_outcome": outcome,
            "new_error_type": error_type,
            "new_error_message": error_message,
        }
        call = await self._one_or_none(Call, _end_statement, values)
        if call is None:
            raise FencedError(f"claim {fence} on call {call_id} was lost or cancelled; nothing was written")
        return call

    async def _update_chosen(self, chosen: Select[str], values: dict[str, Any]) -> list[Call]:
        statement = update(CALLS).where(CALLS.c.id.in_(chosen_once(chosen))).values(**values).returning(CALLS)
        return sorted(await self._all(Call, statement), key=lambda call: call.requested_at)


@FixedStatement
def _enqueue_statement(dialect: str) -> Executable:
    new = insert(dialect, CALLS).values(
        {
            **parameters_of(CallRequest),
            "state": CallState.QUEUED,
            "requested_at": now(),
            "published_at": now(),
        }
    )
    return new.on_conflict_do_nothing(index_elements=[CALLS.c.id]).returning(CALLS.c.id)


@FixedStatement
def _claim_statement(dialect: str) -> Executable:
    new = insert(dialect, CALLS).values(
        {
            **parameters_of(CallRequest),
            "state": CallState.RUNNING,
            "worker": bindparam("worker"),
            "lease_until": seconds_from_now(seconds_parameter("lease_seconds")),
            "fence": 1,
            "requested_at": now(),
            "started_at": now(),
        }
    )
    taken = {name: new.excluded[name] for name in ("state", "worker", "lease_until", "started_at")}
    return new.on_conflict_do_update(
        index_elements=[CALLS.c.id],
        set_={**taken, "fence": CALLS.c.fence + 1},
        where=or_(
            CALLS.c.state == CallState.QUEUED,
            and_(_is_orphan(), CALLS.c.repeatable),
            and_(
                CALLS.c.state == CallState.RUNNING,
                CALLS.c.worker == new.excluded.worker,
                CALLS.c.started_at >= seconds_from_now(seconds_parameter("asked_seconds")),
            ),
        ),
    ).returning(CALLS.c.fence)


@cache
def _listed_statement() -> Executable:
    return select(CALLS).where(CALLS.c.id.in_(bindparam("ids", expanding=True)))


@ListStatement
def _of_round_statement(_dialect: str) -> Executable:
    is_own = CALLS.c.round_id == bindparam("of_round")
    return select(CALLS).where(is_own).order_by(CALLS.c.requested_at, CALLS.c.id)


@FixedStatement
def _end_statement(_dialect: str) -> Executable:
    return (
        update(CALLS)
        .where(
            CALLS.c.id == bindparam("of_call"),
            CALLS.c.state == CallState.RUNNING,
            CALLS.c.fence == bindparam("of_fence"),
        )
        .values(
            state=bindparam("new_state"),
            outcome=bindparam("new_outcome"),
            error_type=bindparam("new_error_type"),
            error_message=bindparam("new_error_message"),
            finished_at=now(),
            lease_until=None,
        )
        .returning(CALLS)
    )


def _is_orphan() -> ColumnElement[bool]:
    return and_(CALLS.c.state == CallState.RUNNING, is_free(CALLS.c.lease_until))


def _open_calls(condition: ColumnElement[bool], limit: int) -> Select[str]:
    """SQL: ids of open calls, oldest first; rows that another sweep has locked are skipped."""
    return (
        select(CALLS.c.id)
        .where(is_one_of(CALLS.c.state, *_OPEN), condition)
        .order_by(CALLS.c.requested_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )


def _verdict(state: CallState) -> ClaimVerdict:
    # A message of a call that awaits approval is not the one that its approval sends.
    if state in (CallState.AWAITING, *_OPEN):
        return ClaimVerdict.BUSY
    return ClaimVerdict.UNKNOWN if state is CallState.UNKNOWN else ClaimVerdict.ENDED


def _unknown() -> dict[str, Any]:
    error = {"error_type": "OutcomeUnknownError", "error_message": _UNKNOWN_MESSAGE}
    return {"state": CallState.UNKNOWN, "finished_at": now(), **error}


def _cancelled(reason: str) -> dict[str, Any]:
    error = {"error_type": "CallCancelledError", "error_message": reason}
    return {"state": CallState.CANCELLED, "finished_at": now(), **error}
