"""Calls with an effect: claimed before they run, recorded together with their results.

The claim makes a repeated delivery harmless. The outcome, the text in the chat's history and
the follow-up round are one transaction: after a crash either all of them exist or none.
Plugin hooks see the text before that transaction begins and may drop it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from loguru import logger

from nekro.app.calls.detached import longest_seconds, settle
from nekro.app.calls.records import error_of
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, request_round
from nekro.app.leases import CALL, HeldLease, LeaseKeeper
from nekro.base.tasks import clean_up_timeout
from nekro.broker.failures import name_of
from nekro.plugins.entries import MethodEntry
from nekro.wire.invocation import Envelope, Invocation
from nekro_agent.durations import GRACE_SECONDS, HOOK_SECONDS, RETRY_SECONDS
from nekro_agent.errors import (
    CallCancelledError,
    CallTimeoutError,
    FencedError,
    OutcomeUnknownError,
    StorageError,
    StorageUnavailableError,
)
from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import MessageKind, SystemMessageHooks
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.repositories.calls import Call, CallRequest, Claim, ClaimVerdict
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import CallState, StoredKind, TriggerKind
from storage.transaction import Transaction

__all__ = ["CallClaims", "CallSubject", "ConfirmApproval", "DuplicateDelivery", "HeldClaim", "TaskSubject"]

#: Raises ``NotApprovedError`` unless a call was approved; see ``nekro.app.approvals.requests``.
ConfirmApproval: TypeAlias = Callable[[Transaction, Invocation], Awaitable[None]]


class DuplicateDelivery(Exception):
    """Another delivery of the same call is running; this delivery must have no effect."""


@dataclass(frozen=True, kw_only=True)
class TaskSubject:
    """What a call runs if it does not call a method, for its record."""

    #: Of the function or command, for the history.
    name: str
    plugin_key: str
    lane: Lane
    type: SandboxMethodType = SandboxMethodType.TOOL
    requires_approval: bool = False


#: What a call runs, for its record.
CallSubject: TypeAlias = MethodEntry | TaskSubject


@dataclass(frozen=True, kw_only=True)
class HeldClaim:
    """The right to run a call, or the outcome of an earlier delivery."""

    call_id: str
    subject: CallSubject
    #: Fencing token; 0 when ``envelope`` is set.
    fence: int = 0
    #: What an earlier delivery returned; the method must not run again.
    envelope: Envelope | None = None
    #: Keeps the claim; None when ``envelope`` is set.
    lease: HeldLease | None = None


class CallClaims:
    """Claims and outcomes of one worker process."""

    def __init__(
        self,
        leases: LeaseKeeper,
        publisher: EventPublisher,
        hooks: SystemMessageHooks,
        *,
        lease_seconds: float,
        confirm: ConfirmApproval,
    ) -> None:
        """Create it.

        Args:
            lease_seconds: how long a claim lasts without renewal.
            confirm: called before the claim of a call that requires approval.
        """
        self._database = leases.database
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._publisher = publisher
        self._hooks = hooks
        self._confirm = confirm
        #: Deliveries that are claiming or running, by call id; used from any thread.
        self._under_way: dict[str, object] = {}
        #: Calls that ran here and whose end could not be recorded.
        self._unrecorded: set[str] = set()

    async def claim(self, subject: CallSubject, invocation: Invocation, *, worker: str) -> HeldClaim:
        """Claim the right to run a call.

        While the database does not answer, the claim is retried until the call's deadline: the call
        may be recorded, and if this delivery failed, the sweep would send it again.

        Raises:
            DuplicateDelivery: another delivery of the call is running.
            CallTimeoutError: the database did not answer before the deadline; the call will not start.
            OutcomeUnknownError: a worker died during an earlier delivery.
            CallCancelledError: the call or its round was cancelled.
            NotApprovedError: it requires approval, and what was approved, if anything, is not this call.
            NekroError: an earlier delivery ended in this error.
        """
        delivery = object()
        if self._under_way.setdefault(invocation.call_id, delivery) is not delivery:
            raise DuplicateDelivery(invocation.call_id)
        held = None
        try:
            held = await self._claim(subject, invocation, worker)
            return held
        finally:
            if held is None or held.envelope is not None:
                del self._under_way[invocation.call_id]

    async def recorded(self, call_id: str) -> Envelope | None:
        """Return what a call returned; None if it has not ended.

        Raises:
            DuplicateDelivery: a worker runs it.
            OutcomeUnknownError: as its row says, or the database does not answer.
            NekroError: as its row says.
        """
        try:
            async with self._database.read() as transaction:
                call = await transaction.calls.find(call_id)
        except StorageError as exc:
            raise OutcomeUnknownError(
                f"call {call_id}: its deadline has passed, and its outcome cannot be read ({exc}); check "
                "before you repeat it"
            ) from exc
        if call is None or call.state is CallState.QUEUED:
            return None
        if call.state is CallState.RUNNING:
            raise DuplicateDelivery(call_id)
        return _earlier_outcome(call)

    async def _claim(self, subject: CallSubject, invocation: Invocation, worker: str) -> HeldClaim:
        claim = await self._claim_with_retries(subject, invocation, worker)
        if claim.verdict is ClaimVerdict.GRANTED:
            lease = self._leases.hold(
                CALL,
                invocation.call_id,
                claim.fence,
                seconds=self._lease_seconds,
                limit_seconds=longest_seconds(invocation),
            )
            return HeldClaim(call_id=invocation.call_id, subject=subject, fence=claim.fence, lease=lease)
        if claim.verdict is ClaimVerdict.BUSY or claim.call is None:
            raise DuplicateDelivery(invocation.call_id)
        if claim.call.detached_at is not None:
            # This delivery may have found that a worker died inside the call; settling is idempotent.
            async with self._database.begin() as transaction:
                await settle(transaction, self._publisher, claim.call)
        return HeldClaim(call_id=invocation.call_id, subject=subject, envelope=_earlier_outcome(claim.call))

    async def _claim_with_retries(self, subject: CallSubject, invocation: Invocation, worker: str) -> Claim:
        """Claim; retry while the database does not answer and the call may still start."""
        first_at: float | None = None
        while True:
            asked_at = time.monotonic()
            since = (
                None if first_at is None or invocation.call_id in self._unrecorded else asked_at - first_at
            )
            try:
                return await self._ask(subject, invocation, worker, since)
            except StorageUnavailableError as exc:
                logger.bind(call_id=invocation.call_id, error=str(exc)).warning("call_not_claimed")
                if invocation.remaining_seconds() <= RETRY_SECONDS:
                    raise CallTimeoutError(
                        f"{invocation.method}: call {invocation.call_id} did not start before its deadline; "
                        f"it could not be claimed: {exc}"
                    ) from exc
            first_at = asked_at if first_at is None else first_at
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(
        self, subject: CallSubject, invocation: Invocation, worker: str, since_seconds: float | None
    ) -> Claim:
        request = CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=subject.type,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=subject.lane.value,
            deadline=invocation.deadline,
            repeatable=invocation.repeatable,
        )
        lease_seconds = min(longest_seconds(invocation), self._lease_seconds)
        async with self._database.autocommit() as transaction:
            if (await transaction.rounds.standing(invocation.round_id)).is_asked_to_stop:
                raise CallCancelledError(f"call {invocation.call_id}: its round was stopped on request")
            if subject.requires_approval:
                await self._confirm(transaction, invocation)
            return await transaction.calls.claim(
                request, worker=worker, lease_seconds=lease_seconds, since_seconds=since_seconds
            )

    async def finish(
        self, claim: HeldClaim, invocation: Invocation, envelope: Envelope, *, value: Any = None
    ) -> Envelope:
        """Record a returned call and its consequences; returns the envelope to send.

        Args:
            value: what a TOOL method returned, for the chat if its caller waits no longer.

        Raises:
            OutcomeUnknownError: the claim was lost meanwhile, or the database refused the record or was
                unavailable for longer than the claim's margin.
        """
        try:
            with self._ending(claim):
                text, stopped = await self._shown_text(invocation.chat_key, envelope.text)
                recorded = await self._record_with_retries(claim, invocation, envelope, text, value)
        except OutcomeUnknownError:
            raise
        except BaseException as exc:
            self._unrecorded.add(claim.call_id)
            if not isinstance(exc, StorageError):
                raise
            raise OutcomeUnknownError(
                f"call {claim.call_id}: the method ran and its end could not be recorded ({exc}); its effect "
                "may have happened, so check before you repeat it"
            ) from exc
        if stopped is not None:
            raise stopped
        return recorded

    async def _record_with_retries(
        self, claim: HeldClaim, invocation: Invocation, envelope: Envelope, text: str | None, value: Any
    ) -> Envelope:
        give_up_at = time.monotonic() + 3 * GRACE_SECONDS
        while True:
            try:
                try:
                    return await self._record(claim, invocation, envelope, text, value)
                except FencedError as exc:
                    return await self._recorded_before(claim, exc)
            except StorageUnavailableError as exc:
                # The method has run; a restart of the database must not lose its outcome.
                logger.bind(call_id=claim.call_id, error=str(exc)).warning("call_end_not_recorded")
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    @contextmanager
    def _ending(self, claim: HeldClaim) -> Iterator[None]:
        try:
            with nullcontext() if claim.lease is None else claim.lease.ending():
                yield
        finally:
            self._under_way.pop(claim.call_id, None)

    async def _record(
        self, claim: HeldClaim, invocation: Invocation, envelope: Envelope, text: str | None, value: Any
    ) -> Envelope:
        async with self._database.begin() as transaction:
            if invocation.round_id is not None and (text is not None or envelope.type.wakes_agent):
                await transaction.chats.lock(invocation.chat_key, exists=True)
            if text is not None:
                await self._record_text(transaction, claim, invocation, text)
            round_id = await self._follow_up(transaction, invocation, envelope)
            envelope = envelope.model_copy(update={"round_id": round_id})
            ended = await transaction.calls.finish(
                claim.call_id, fence=claim.fence, outcome=envelope.model_dump(mode="json")
            )
            await settle(transaction, self._publisher, ended, value=value)
            size = ROW_BYTES + size_of(envelope.value, envelope.text)
            account_id = _own_account(invocation)
            transaction.stored_bytes.add(account_id, StoredKind.CALLS, size, refuses=False)
        return envelope

    async def _recorded_before(self, claim: HeldClaim, exc: FencedError) -> Envelope:
        """Return what an earlier attempt committed before its connection broke; else the claim is lost."""
        async with self._database.read() as transaction:
            call = await transaction.calls.find(claim.call_id)
        if call is not None and (call.state, call.fence) == (CallState.DONE, claim.fence) and call.outcome:
            return Envelope.model_validate(call.outcome)
        raise OutcomeUnknownError(
            f"call {claim.call_id}: the claim was lost while the method ran; its effect may have happened"
        ) from exc

    async def fail(self, claim: HeldClaim, error: BaseException) -> None:
        """Record that a call raised; if that fails, log it, since the caller gets ``error`` either way."""
        message = str(error) if isinstance(error, Exception) else repr(error)
        try:
            with self._ending(claim):
                await self._record_failure(claim, name_of(error), message)
        except BaseException as exc:
            if not isinstance(exc, FencedError):
                self._unrecorded.add(claim.call_id)
            if not isinstance(exc, StorageError):
                raise
            logger.bind(call_id=claim.call_id, error=type(exc).__name__).warning("call_failure_not_recorded")

    async def _record_failure(self, claim: HeldClaim, error_type: str, message: str) -> None:
        async with self._database.begin() as transaction:
            ended = await transaction.calls.fail(
                claim.call_id, fence=claim.fence, error_type=error_type, error_message=message
            )
            await settle(transaction, self._publisher, ended)

    async def _shown_text(
        self, chat_key: str, text: str | None
    ) -> tuple[str | None, asyncio.CancelledError | None]:
        """Return the text unless plugins drop it, and the cancellation that stopped their hooks.

        The method has run, so its outcome is recorded before the cancellation proceeds.
        """
        try:
            is_dropped = text is not None and await self._is_dropped(chat_key, text)
        except asyncio.CancelledError as exc:
            return text, exc
        return None if is_dropped else text, None

    async def _is_dropped(self, chat_key: str, text: str) -> bool:
        try:
            async with clean_up_timeout(HOOK_SECONDS):
                return await self._hooks.on_system_message(chat_key, text)
        except TimeoutError:
            logger.bind(chat_key=chat_key, seconds=HOOK_SECONDS).warning("system_message_hooks_too_slow")
        except Exception as exc:  # such as a database that does not answer; the outcome matters more
            logger.bind(chat_key=chat_key, error=repr(exc)).warning("system_message_hooks_failed")
        return False

    async def _record_text(
        self, transaction: Transaction, claim: HeldClaim, invocation: Invocation, text: str
    ) -> None:
        message = NewMessage(
            chat_key=invocation.chat_key,
            kind=MessageKind.SYSTEM,
            text=text,
            call_id=invocation.call_id,
            round_id=invocation.round_id,
            turn_id=invocation.turn_id,
            plugin_key=claim.subject.plugin_key,
            data={"method": claim.subject.name},
            once_key=f"observation:{invocation.call_id}",
        )
        later = _answer_goes_first(claim.subject.type, invocation)
        await append_message(
            transaction,
            self._publisher,
            message,
            later=later,
            account_id=_own_account(invocation),
            is_admitted=True,
        )

    async def _follow_up(
        self, transaction: Transaction, invocation: Invocation, envelope: Envelope
    ) -> str | None:
        if not (envelope.type.wakes_agent and invocation.wakes_agent):
            return None
        await transaction.chats.lock(invocation.chat_key, create=True)
        # A request to stop takes the chat's lock too: either it sees the follow-up round and
        # cancels it, or it came first and no round is requested.
        later = _answer_goes_first(envelope.type, invocation)
        request = RoundRequest(
            chat_key=invocation.chat_key,
            trigger_kind=TriggerKind.CALL,
            trigger_id=invocation.call_id,
            turn_id=invocation.turn_id,
            cause_turn_id=invocation.turn_id or invocation.account_id,
            number=invocation.round_number + 1,
            user_id=invocation.user_id,
            observation=envelope.text,
            segments=envelope.segments,
        )
        in_time = invocation.waited_seconds_left() > 0
        if in_time and invocation.round_id is not None:
            requested = await request_round(
                transaction, self._publisher, request, during=invocation.round_id, later=later
            )
            if requested is not None:
                return requested.id
        standing = await transaction.rounds.standing(invocation.round_id)
        if standing.is_asked_to_stop:
            return None
        # A call that outlived its run begins a new turn: the old one may have ended, or its time is over.
        is_open = in_time and (
            standing.is_running
            or invocation.turn_id in await transaction.rounds.open_turns(invocation.chat_key)
        )
        if not is_open:
            request = replace(request, turn_id=None)
        requested = await request_round(transaction, self._publisher, request, later=later)
        return requested.id if requested else None


def _answer_goes_first(type_: SandboxMethodType, invocation: Invocation) -> bool:
    """Whether a round waits for the result and continues with the follow-up round itself.

    That round holds the chat's lease until then, so an event now would wake no worker that can act.
    """
    return type_.wakes_agent and invocation.round_id is not None and invocation.waited_seconds_left() > 0


def _earlier_outcome(call: Call) -> Envelope:
    if call.state is CallState.DONE and call.outcome is not None:
        return Envelope.model_validate(call.outcome)
    raise error_of(call)


def _own_account(invocation: Invocation) -> str | None:
    """Return on whose account a call outside of rounds stores something; a round counts its calls itself."""
    return None if invocation.turn_id is not None else invocation.account_id
