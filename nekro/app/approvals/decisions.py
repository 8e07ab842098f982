"""Decisions on calls that wait for approval: by people, by time, and by those who cancel the work.

Each decision is one transaction with its consequences. All of them lock the chat first, so none waits for
a row that a holder of the chat's lock holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from broker_config.settings import ApprovalSettings
from nekro.app.approvals.requests import ApprovalSeal, digest_of, record_decided
from nekro.app.approvals.shown import arguments_of
from nekro.app.calls.detached import begin_job, settle
from nekro.app.calls.waits import cancel_waits
from nekro.app.retried_writes import write_with_retries
from nekro.broker.delivery.messages import CallMessage
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import refuse_unfit
from nekro.wire.invocation import Signer
from nekro.wire.values import Arguments, encode_arguments
from nekro_agent.errors import (
    AlreadyDecidedError,
    InvalidValueError,
    MessageRefusedError,
)
from nekro_agent.shared_clock import shared_time
from storage.accounts.approvals import Approval, Decision
from storage.engine import Database
from storage.repositories.calls import Call
from storage.states import ApprovalScope, ApprovalState
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["ApprovalDecisions", "cancel_pending"]

#: Error type of a call that was denied or whose approval expired.
_NOT_APPROVED: Final = "NotApprovedError"


class ApprovalDecisions:
    """Decides on calls, from any process."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: ApprovalSettings,
        *,
        signer: Signer,
        seal: ApprovalSeal,
        find_method: Callable[[str], Awaitable[MethodEntry]],
        lane_seconds: Callable[[str], float],
    ) -> None:
        """Create it.

        Args:
            find_method: returns a method as the fleet serves it.
            lane_seconds: returns the time limit of the calls of a lane.
        """
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._signer = signer
        self._seal = seal
        self._find_method = find_method
        self._lane_seconds = lane_seconds

    async def approve(
        self,
        approval_id: str,
        *,
        by: str,
        scope: ApprovalScope = ApprovalScope.ONCE,
        reason: str | None = None,
        arguments: Arguments | None = None,
        is_repetition: bool = False,
    ) -> Approval:
        """Let a call run, once and under its id; its result goes to the chat.

        Args:
            by: whose decision it is.
            scope: what else it permits.
            arguments: replace those of the request; None keeps them.
            is_repetition: whether the same decision may have been recorded before; then it is not an error.

        Raises:
            NotFoundError: there is no such request.
            AlreadyDecidedError: someone decided before, or the request has expired.
            ArgumentError: the replaced arguments do not fit the method.
            InvalidValueError: the scope is a turn, and the call belongs to none.
            MessageRefusedError: the stored call is not the one that approval was requested for.
            StorageUnavailableError: the database does not answer; nothing was decided.
            OutcomeUnknownError: the database does not answer; the decision may have been recorded.
        """
        async with self._database.read() as transaction:
            asked = await transaction.approvals.get(approval_id)
        if scope is ApprovalScope.TURN and asked.root_turn_id is None:
            raise InvalidValueError(
                f"approval {asked.id} belongs to no turn; approve it once or for its chat"
            )
        edited = None if arguments is None else await self._edited(asked, arguments)
        digest = digest_of(asked.method, asked.arguments if edited is None else edited)
        until = None
        if scope is not ApprovalScope.ONCE:
            until = shared_time() + timedelta(seconds=self._settings.grant_seconds)
        seal = self._seal.sign(asked, digest=digest, scope=scope, grant_until=until, decided_by=by)
        decision = Decision(
            state=ApprovalState.APPROVED,
            decided_by=by,
            reason=reason,
            scope=scope,
            edited_arguments=edited,
            digest=digest,
            grant_until=until,
            seal=seal,
        )

        async def write(transaction: Transaction) -> Approval:
            row = await self._decide(transaction, asked, decision)
            await self._release(transaction, row)
            await record_decided(transaction, self._publisher, row)
            return row

        row = await self._record(asked.id, decision, write, is_repetition=is_repetition)
        logger.bind(approval_id=row.id, method=row.method, by=by, scope=scope.value).info("call_approved")
        return row

    async def deny(
        self, approval_id: str, *, by: str, reason: str | None = None, is_repetition: bool = False
    ) -> Approval:
        """Refuse a call, and notify its chat and the model.

        Args:
            by: whose decision it is.
            is_repetition: see ``approve``.

        Raises:
            NotFoundError, AlreadyDecidedError, StorageUnavailableError, OutcomeUnknownError: see
                ``approve``.
        """
        decision = Decision(state=ApprovalState.DENIED, decided_by=by, reason=reason)
        why = f"{by} denied it: {reason}" if reason else f"{by} denied it"

        async def write(transaction: Transaction) -> Approval:
            asked = await transaction.approvals.get(approval_id)
            row = await self._decide(transaction, asked, decision)
            await self._refuse(transaction, row, why, is_new_work=True)
            return row

        row = await self._record(approval_id, decision, write, is_repetition=is_repetition)
        logger.bind(approval_id=row.id, method=row.method, by=by).info("call_denied")
        return row

    async def expire(self, chat_key: str, *, limit: int) -> int:
        """End the expired requests of a chat; returns how many."""
        async with self._database.begin() as transaction:
            await transaction.chats.lock(chat_key, create=True)
            expired = await transaction.approvals.expire(chat_key, limit=limit)
            for row in expired:
                await self._refuse(transaction, row, "no decision in time", is_new_work=False)
        return len(expired)

    async def _record(
        self,
        approval_id: str,
        decision: Decision,
        write: Callable[[Transaction], Awaitable[Approval]],
        *,
        is_repetition: bool,
    ) -> Approval:
        """Write a decision; one that an earlier attempt may have recorded is not an error."""
        may_be_recorded = is_repetition

        async def write_once(transaction: Transaction) -> Approval:
            nonlocal may_be_recorded
            was_tried, may_be_recorded = may_be_recorded, True
            try:
                return await write(transaction)
            except AlreadyDecidedError:  # nothing was written
                row = await transaction.approvals.get(approval_id)
                if was_tried and _is_recorded(row, decision):
                    return row
                raise

        unknown = f"the decision on approval {approval_id} may or may not be recorded; look at it first"
        return await write_with_retries(
            self._database.begin, write_once, unknown=unknown, is_in_doubt=is_repetition
        )

    async def _edited(self, asked: Approval, arguments: Arguments) -> str:
        args, kwargs = arguments
        text = encode_arguments(args, kwargs)
        arguments_of(text)  # it is not too long
        refuse_unfit(await self._find_method(asked.method), len(args), kwargs)
        return text

    async def _decide(self, transaction: Transaction, asked: Approval, decision: Decision) -> Approval:
        await transaction.chats.lock(asked.chat_key, create=True)
        row = await transaction.approvals.decide(asked.id, decision, digest=asked.digest)
        if row is None:
            raise _decided_before(await transaction.approvals.get(asked.id))
        return row

    async def _release(self, transaction: Transaction, row: Approval) -> None:
        """Queue the call of an approval, and publish it after the commit; the sweep repeats that."""
        call = await transaction.calls.find(row.call_id)
        message = self._approved_message(row, call)
        invocation = message.invocation
        released = await transaction.awaiting_calls.release(
            row.call_id, invocation=message.to_row(), deadline=invocation.deadline
        )
        if released is None:
            raise MessageRefusedError(f"call {row.call_id} does not wait for approval {row.id}")
        await begin_job(transaction, self._publisher, released, invocation)
        transaction.after_commit(lambda: self._publisher.call_queued(message))

    def _approved_message(self, row: Approval, call: Call | None) -> CallMessage:
        if call is None:
            raise MessageRefusedError(f"call {row.call_id} of approval {row.id} is not recorded")
        stored = CallMessage.from_row(call.invocation or {}, signer=self._signer)
        asked = stored.invocation
        found = (asked.call_id, asked.chat_key, asked.turn_id, asked.method, asked.args)
        if found != (row.call_id, row.chat_key, row.turn_id, row.method, row.arguments):
            raise MessageRefusedError(
                f"call {row.call_id} is not the one that approval {row.id} was requested for; it does not run"
            )
        now = shared_time()
        approved = asked.model_copy(
            update={
                "args": row.running_arguments,
                "approval_id": row.id,
                # The decision of a person begins new work: the limit of rounds counts from here.
                "round_number": 0,
                "issued_at": now,
                "waits_until": now,
                "deadline": now + timedelta(seconds=self._lane_seconds(row.lane)),
            }
        )
        return CallMessage.of(approved, signer=self._signer, lane=row.lane, reply_to=None, trace=stored.trace)

    async def _refuse(self, transaction: Transaction, row: Approval, why: str, *, is_new_work: bool) -> None:
        """End the call of a request that was not approved, and notify its chat.

        Args:
            is_new_work: whether the limit of rounds of its turn counts from here. Expiry does not begin new
                work, so a model that asks again each time comes to an end.
        """
        call = await transaction.calls.find(row.call_id)
        stored: dict[str, Any] = (call.invocation if call is not None else None) or {}
        if is_new_work and "invocation" in stored:
            stored = {**stored, "invocation": {**stored["invocation"], "round_number": 0}}
        refused = await transaction.awaiting_calls.refuse(
            row.call_id,
            error_type=_NOT_APPROVED,
            error_message=f"approval {row.id}: {why}",
            invocation=stored or None,
        )
        if refused is not None:
            await settle(transaction, self._publisher, refused)
        await record_decided(transaction, self._publisher, row)


async def cancel_pending(
    transaction: Transaction,
    publisher: EventPublisher,
    chat_key: str,
    *,
    reason: str,
    turn_id: str | None = None,
    round_id: str | None = None,
) -> list[str]:
    """Withdraw the pending requests of a chat and end its waits, without notifying the model.

    Returns the calls that waited.

    Args:
        turn_id, round_id: only those of one turn or round; None does not limit.
    """
    await transaction.chats.lock(chat_key, create=True)
    rows = await transaction.approvals.cancel(chat_key, reason=reason, turn_id=turn_id, round_id=round_id)
    await transaction.awaiting_calls.cancel([row.call_id for row in rows], reason=reason)
    for row in rows:
        await record_decided(transaction, publisher, row)
    ended = await cancel_waits(
        transaction, publisher, chat_key, reason=reason, turn_id=turn_id, round_id=round_id
    )
    return [*(row.call_id for row in rows), *ended]


def _is_recorded(row: Approval, decision: Decision) -> bool:
    """Whether a row has this decision; its times may be those of an earlier attempt."""
    recorded = (row.state, row.decided_by, row.scope, row.reason)
    wanted = (decision.state, decision.decided_by, decision.scope, decision.reason)
    return recorded == wanted and decision.digest in (None, row.digest)


def _decided_before(row: Approval) -> AlreadyDecidedError:
    if row.state is ApprovalState.PENDING:
        return AlreadyDecidedError(f"approval {row.id} expired at {row.expires_at.isoformat()}")
    by = f" by {row.decided_by}" if row.decided_by else ""
    at = f" at {row.decided_at.isoformat()}" if row.decided_at else ""
    return AlreadyDecidedError(f"approval {row.id} is {row.state.value}{by}{at}; nothing was changed")
