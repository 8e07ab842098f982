"""Requests for approval: a call that must wait becomes rows, and nothing waits in memory.

An approval is bound to the method, the arguments, and the signature of the decision. A worker checks it: a
call that requires approval runs only with one, wherever its message came from. The transaction that records
an event of an approval must have locked the chat."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import ApprovalSettings
from nekro.app.approvals.shown import arguments_of, shown_call
from nekro.app.calls.waits import may_park
from nekro.app.chats.events import record_caused
from nekro.app.chats.writer import append_message
from nekro.app.retried_writes import write_with_retries
from nekro.broker.delivery.messages import CallMessage
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import refuse_unfit
from nekro.wire import plain_json
from nekro.wire.invocation import Invocation, Signer, new_id
from nekro.wire.seals import APPROVAL, Seal
from nekro_agent.errors import CallCancelledError, NotApprovedError
from nekro_agent.ports import MessageKind
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.accounts.approvals import Approval, Decision, NewApproval
from storage.engine import Database
from storage.repositories.calls import CallRequest
from storage.repositories.events import NewEvent
from storage.repositories.messages import NewMessage
from storage.repositories.parked_programs import Wait
from storage.states import ApprovalScope, ApprovalState, WaitKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pydantic import SecretStr

    from nekro.app.chats.publisher import EventPublisher
    from storage.accounts.approvals import Approval, NewApproval

__all__ = [
    "ApprovalCheck",
    "ApprovalRequests",
    "ApprovalSeal",
    "digest_of",
    "record_decided",
    "record_requested",
]


def digest_of(method: str, arguments: str) -> str:
    """Return the SHA-256 of a call, in hexadecimal.

    Args:
        arguments: tagged text.
    """
    # JSON is unambiguous: no two pairs have the same encoding.
    return hashlib.sha256(plain_json.dump([method, arguments])).hexdigest()


class ApprovalSeal:
    """Signs approvals, so that a row that was changed in the database permits nothing."""

    def __init__(self, key: SecretStr) -> None:
        self._seal = Seal(key, purpose=APPROVAL)

    def sign(
        self,
        asked: NewApproval,
        *,
        digest: str,
        scope: ApprovalScope,
        grant_until: datetime | None,
        decided_by: str,
    ) -> str:
        """Return the signature of an approval."""
        return self._seal.sign(_fields(asked, digest, scope, grant_until, decided_by))

    def fits(self, row: Approval) -> bool:
        """Whether a row is an approval as it was signed."""
        if row.scope is None or row.decided_by is None:
            return False
        fields = _fields(row, row.digest, row.scope, row.grant_until, row.decided_by)
        return self._seal.fits(fields, row.seal)


def _fields(
    row: NewApproval, digest: str, scope: ApprovalScope, grant_until: datetime | None, decided_by: str
) -> list[str]:
    until = "" if grant_until is None else grant_until.isoformat()
    turn = row.root_turn_id or ""
    return [row.id, row.call_id, row.chat_key, turn, row.method, digest, scope.value, until, decided_by]


class ApprovalCheck:
    """Compares calls with the decisions of people."""

    def __init__(self, seal: ApprovalSeal) -> None:
        self._seal = seal

    async def permits(self, transaction: Transaction, invocation: Invocation) -> bool:
        """Whether an approval for a turn or a chat lets a call pass without a request of its own."""
        granted = await transaction.approvals.grants(
            invocation.chat_key, invocation.method, turn_id=invocation.turn_id
        )
        return any(map(self._seal.fits, granted))

    async def confirm(self, transaction: Transaction, invocation: Invocation) -> None:
        """Return if a call was approved.

        Args:
            invocation: verified; its signature says which process made it, not who permitted it.

        Raises:
            NotApprovedError: it was not approved, or what was approved differs from it.
        """
        own = await transaction.approvals.of_call(invocation.call_id)
        if own is None:
            if not await self.permits(transaction, invocation):
                raise NotApprovedError(
                    f"{invocation.method} requires approval, and call {invocation.call_id} has none"
                )
            return
        if own.state is not ApprovalState.APPROVED:
            raise NotApprovedError(
                f"call {invocation.call_id} of {invocation.method} is not approved: approval {own.id} is "
                f"{own.state.value}"
            )
        if not (self._seal.fits(own) and _is_of(own, invocation)):
            raise NotApprovedError(
                f"call {invocation.call_id} of {invocation.method} is not what approval {own.id} permits"
            )


def _is_of(row: Approval, invocation: Invocation) -> bool:
    return (row.method, row.chat_key, row.digest) == (
        invocation.method,
        invocation.chat_key,
        digest_of(invocation.method, invocation.args),
    )


#: Longer calls are not repeated in the event; the approval's row has them in full.
_MOST_CHARS: Final = 4000


async def record_requested(transaction: Transaction, publisher: EventPublisher, row: Approval) -> None:
    """Record that a call waits for approval."""
    data: dict[str, Any] = {
        "approval_id": row.id,
        "number": row.number,
        "method": row.method,
        "user_id": row.user_id,
        "expires_at": row.expires_at.isoformat(),
    }
    call = shown_call(row.method, row.arguments)
    data |= {"call": call} if len(call) <= _MOST_CHARS else {"call_chars": len(call)}
    await record_caused(transaction, publisher, row.chat_key, _event(EventType.APPROVAL_REQUESTED, row, data))


async def record_decided(transaction: Transaction, publisher: EventPublisher, row: Approval) -> None:
    """Record how a request ended."""
    data = {
        "approval_id": row.id,
        "method": row.method,
        "state": row.state.value,
        "scope": None if row.scope is None else row.scope.value,
        "decided_by": row.decided_by,
        "reason": row.reason,
        "is_edited": row.edited_arguments is not None,
    }
    await record_caused(transaction, publisher, row.chat_key, _event(EventType.APPROVAL_DECIDED, row, data))


def _event(kind: EventType, row: Approval, data: dict[str, Any]) -> NewEvent:
    return NewEvent(type=kind, turn_id=row.turn_id, round_id=row.round_id, call_id=row.call_id, data=data)


#: Longer calls are not repeated in the chat.
_MOST_SHOWN_CHARS: Final = 2000


class ApprovalRequests:
    """The callers' side; implements ``nekro.app.calls.dispatch.ApprovalGate``."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: ApprovalSettings,
        *,
        signer: Signer,
        seal: ApprovalSeal,
    ) -> None:
        self._database = database
        self._publisher = publisher
        self._settings = settings
        self._signer = signer
        self._seal = seal
        self._check = ApprovalCheck(seal)

    async def admit(
        self,
        entry: MethodEntry,
        invocation: Invocation,
        *,
        lane: str,
        program_id: str | None = None,
        note: str = "",
    ) -> str | None:
        """Let a call pass that an approval of its turn or chat permits; else request approval of it.

        Returns None if it may pass, else the id of the request: the call runs when that is approved, and its
        result goes to its program or to the chat.

        Args:
            program_id: the program that goes on after the decision, unless too many of the chat wait; None:
                the chat gets the result.
            note: what the program read before the call.

        Raises:
            ArgumentError: the arguments do not fit the method, or are too long to be shown.
            CallCancelledError: the call's round was stopped.
            StorageUnavailableError: the database does not answer; approval was not requested.
            OutcomeUnknownError: the database does not answer; approval may have been requested.
        """
        async with self._database.read() as transaction:
            if await self._check.permits(transaction, invocation):
                return None
        return (await self.ask(entry, invocation, lane=lane, program_id=program_id, note=note)).id

    async def ask(
        self,
        entry: MethodEntry,
        invocation: Invocation,
        *,
        lane: str,
        program_id: str | None = None,
        note: str = "",
    ) -> Approval:
        """Request approval of a call, unless it was requested before.

        Args:
            program_id, note: as in ``admit``.

        Raises:
            The errors of ``admit``.
        """
        args, kwargs = arguments_of(invocation.args)
        refuse_unfit(entry, len(args), kwargs)
        new = await self._new(invocation, lane=lane)
        message = CallMessage.of(invocation, signer=self._signer, lane=lane, reply_to=None)
        call = CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=entry.type,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=lane,
            repeatable=invocation.repeatable,
            invocation=message.to_row(),
            readings=note or None,
        )

        async def write(transaction: Transaction) -> Approval:
            await transaction.chats.lock(invocation.chat_key, create=True)
            # A request to stop takes the lock too: it either finds this request, or came before it.
            if (await transaction.rounds.standing(invocation.round_id)).is_asked_to_stop:
                raise CallCancelledError(f"call {invocation.call_id}: its round was stopped on request")
            is_new = await transaction.approvals.add(new)
            row = await transaction.approvals.of_call(invocation.call_id)
            assert row is not None  # noqa: S101 - just added
            if is_new:
                await transaction.awaiting_calls.add(call)
                if program_id is not None and await may_park(transaction, call.chat_key, program_id):
                    wait = Wait(
                        call_id=call.id,
                        program_id=program_id,
                        chat_key=call.chat_key,
                        turn_id=row.turn_id,
                        kind=WaitKind.APPROVAL,
                        until=row.expires_at,
                    )
                    await transaction.parked_programs.begin(wait)
                await append_message(transaction, self._publisher, self._notice(row))
                await record_requested(transaction, self._publisher, row)
            return row

        return await self._write_with_retries(write, invocation)

    async def permit(self, invocation: Invocation, *, lane: str, by: str) -> Approval:
        """Record that the one who makes a call approves it.

        Args:
            by: whose decision it is.

        Raises:
            StorageUnavailableError, OutcomeUnknownError: see ``admit``; the call must not be sent.
        """
        new = await self._new(invocation, lane=lane)
        seal = self._seal.sign(
            new, digest=new.digest, scope=ApprovalScope.ONCE, grant_until=None, decided_by=by
        )
        decision = Decision(state=ApprovalState.APPROVED, decided_by=by, scope=ApprovalScope.ONCE, seal=seal)

        async def write(transaction: Transaction) -> Approval:
            await transaction.chats.lock(invocation.chat_key, create=True)
            is_new = await transaction.approvals.add(new, decision)
            row = await transaction.approvals.of_call(invocation.call_id)
            assert row is not None  # noqa: S101 - just added
            if is_new:
                await record_decided(transaction, self._publisher, row)
            return row

        return await self._write_with_retries(write, invocation)

    async def _new(self, invocation: Invocation, *, lane: str) -> NewApproval:
        root = turn_id = invocation.turn_id
        if turn_id is not None:
            async with self._database.read() as transaction:
                root = await transaction.approvals.root_of(turn_id)
        return NewApproval(
            id=new_id(),
            call_id=invocation.call_id,
            chat_key=invocation.chat_key,
            turn_id=turn_id,
            round_id=invocation.round_id,
            root_turn_id=root,
            user_id=invocation.user_id,
            method=invocation.method,
            lane=lane,
            arguments=invocation.args,
            digest=digest_of(invocation.method, invocation.args),
            expires_at=shared_time() + timedelta(seconds=self._settings.pending_seconds),
        )

    def _notice(self, row: Approval) -> NewMessage:
        """Return the message for people and the model that the call waits."""
        text = f"{row.method} waits for approval {row.number}; it has not run yet."
        if self._settings.approvers:
            call = shown_call(row.method, row.arguments)
            is_short = len(call) <= _MOST_SHOWN_CHARS
            text += f"\n{call}\n" if is_short else f" /approvals {row.number} shows it in full. "
            text += f"Answer /approve {row.number} or /deny {row.number} REASON."
        return NewMessage(
            chat_key=row.chat_key,
            kind=MessageKind.ASSISTANT,
            text=text,
            call_id=row.call_id,
            round_id=row.round_id,
            turn_id=row.turn_id,
            once_key=f"approval:{row.id}",
        )

    async def _write_with_retries(
        self, write: Callable[[Transaction], Awaitable[Approval]], invocation: Invocation
    ) -> Approval:
        """Write once, and retry during a short outage of the database; the row of the call is unique."""
        unknown = (
            f"the approval of call {invocation.call_id} of {invocation.method} may or may not have been "
            "requested; the call has not run"
        )
        return await write_with_retries(self._database.begin, write, unknown=unknown)
