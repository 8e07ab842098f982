"""Calls with an effect: claimed before they run, recorded with what they leave behind.

The claim makes a repeated delivery harmless. The outcome, the text in the chat's history and
the follow-up round are one transaction: after a crash either all of them are there or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from loguru import logger

from broker_config.wire import Envelope, Invocation
from nekro_agent.errors import (
    CallCancelledError,
    FencedError,
    MethodFailedError,
    NekroError,
    OutcomeUnknownError,
    StorageError,
)
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import MessageKind
from storage.calls import Call, CallRequest, ClaimVerdict
from storage.engine import Database
from storage.messages import NewMessage
from storage.rounds import RoundRequest
from storage.states import CallState, TriggerKind
from storage.transaction import Transaction
from workers.messages import announce_message
from workers.publisher import EventPublisher
from workers.registry import MethodEntry

__all__ = ["CallClaims", "DuplicateDelivery", "HeldClaim"]

#: How long a claim outlives its call's deadline, for recording how the call ended.
CLAIM_MARGIN_SECONDS: Final = 15.0


class DuplicateDelivery(Exception):
    """Another delivery of the same call is running; this one must leave no trace."""


@dataclass(frozen=True, kw_only=True)
class HeldClaim:
    """The right to run a call, or what became of it already."""

    call_id: str
    entry: MethodEntry
    #: Fencing token; 0 when ``envelope`` is set.
    fence: int = 0
    #: What an earlier delivery returned; the method must not run again.
    envelope: Envelope | None = None


class CallClaims:
    """Claims and outcomes of one worker process."""

    def __init__(self, database: Database, publisher: EventPublisher) -> None:
        self._database = database
        self._publisher = publisher

    async def claim(self, entry: MethodEntry, invocation: Invocation, *, worker: str) -> HeldClaim:
        """Ask for the right to run a call.

        Raises:
            DuplicateDelivery: another delivery of it is running.
            OutcomeUnknownError: a worker died inside it.
            CallCancelledError: its round was stopped, or it was cancelled itself.
            MethodFailedError: so it ended before.
        """
        request = CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=entry.type,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=entry.lane.value,
            deadline=invocation.deadline,
        )
        lease_seconds = max(invocation.remaining_seconds(), 0) + CLAIM_MARGIN_SECONDS
        async with self._database.autocommit() as transaction:
            if await _is_round_stopped(transaction, invocation):
                raise CallCancelledError(f"call {invocation.call_id}: its round was stopped on request")
            claim = await transaction.calls.claim(request, worker=worker, lease_seconds=lease_seconds)
        held = HeldClaim(call_id=invocation.call_id, entry=entry, fence=claim.fence)
        if claim.verdict is ClaimVerdict.GRANTED:
            return held
        if claim.verdict is ClaimVerdict.BUSY or claim.call is None:
            raise DuplicateDelivery(invocation.call_id)
        return HeldClaim(call_id=invocation.call_id, entry=entry, envelope=_earlier_outcome(claim.call))

    async def finish(self, claim: HeldClaim, invocation: Invocation, envelope: Envelope) -> Envelope:
        """Record a returned call with everything that follows from it; returns the envelope to send.

        Raises:
            OutcomeUnknownError: the claim was lost meanwhile; nothing was written.
        """
        try:
            async with self._database.begin() as transaction:
                round_id = await self._leave_behind(transaction, claim, invocation, envelope)
                envelope = envelope.model_copy(update={"round_id": round_id})
                await transaction.calls.finish(
                    claim.call_id, fence=claim.fence, outcome=envelope.model_dump(mode="json")
                )
        except FencedError as exc:
            raise OutcomeUnknownError(
                f"call {claim.call_id}: the claim was lost while the method ran; its effect may have happened"
            ) from exc
        return envelope

    async def fail(self, claim: HeldClaim, error: BaseException) -> None:
        """Record that a call raised; if that fails, log it: the caller gets ``error`` either way."""
        message = str(error) if isinstance(error, Exception) else repr(error)
        try:
            async with self._database.begin() as transaction:
                await transaction.calls.fail(
                    claim.call_id, fence=claim.fence, error_type=type(error).__name__, error_message=message
                )
        except StorageError as exc:
            logger.bind(call_id=claim.call_id, error=type(exc).__name__).warning("call_failure_not_recorded")

    async def _leave_behind(
        self, transaction: Transaction, claim: HeldClaim, invocation: Invocation, envelope: Envelope
    ) -> str | None:
        await transaction.chats.ensure(invocation.chat_key)
        message, is_new = await transaction.messages.append_once(
            NewMessage(
                chat_key=invocation.chat_key,
                kind=MessageKind.SYSTEM,
                text=_history_text(envelope),
                call_id=invocation.call_id,
                round_id=invocation.round_id,
                plugin_key=claim.entry.plugin.key,
                data={"method": claim.entry.name},
                once_key=f"observation:{invocation.call_id}",
            )
        )
        if is_new:
            announce_message(transaction, self._publisher, message)
        if not (envelope.type.wakes_agent and invocation.wakes_agent):
            return None
        # Under the chat's lock, which a request to stop takes as well: either it sees the follow-up
        # round and cancels it, or it was there first and there is none.
        if await _is_round_stopped(transaction, invocation):
            return None
        return await self._request_round(transaction, invocation, envelope)

    async def _request_round(
        self, transaction: Transaction, invocation: Invocation, envelope: Envelope
    ) -> str:
        round_, _ = await transaction.rounds.request(
            RoundRequest(
                chat_key=invocation.chat_key,
                trigger_kind=TriggerKind.CALL,
                trigger_id=invocation.call_id,
                turn_id=invocation.turn_id,
                number=invocation.round_number + 1,
                user_id=invocation.user_id,
                observation=envelope.text,
                segments=envelope.segments,
            )
        )
        transaction.after_commit(lambda: self._publisher.round_requested(invocation.chat_key))
        return round_.id


async def _is_round_stopped(transaction: Transaction, invocation: Invocation) -> bool:
    round_id = invocation.round_id
    return round_id is not None and await transaction.rounds.is_cancel_requested(round_id)


def _earlier_outcome(call: Call) -> Envelope:
    if call.state is CallState.DONE and call.outcome is not None:
        return Envelope.model_validate(call.outcome)
    raise _error_of(call)


def _error_of(call: Call) -> NekroError:
    if call.state is CallState.CANCELLED:
        return CallCancelledError(f"call {call.id} was cancelled")
    if call.state is CallState.FAILED:
        return MethodFailedError(call.error_type or "Exception", call.error_message or "")
    return OutcomeUnknownError(
        f"call {call.id} of {call.method}: a worker died inside it, so its effect may or may not have "
        "happened; check before you repeat it"
    )


def _history_text(envelope: Envelope) -> str:
    if envelope.type is not SandboxMethodType.MULTIMODAL_AGENT:
        return envelope.text or ""
    return "\n".join(map(_part_text, envelope.segments or []))


def _part_text(part: dict[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    return f"[{part.get('type', 'part')}]"
