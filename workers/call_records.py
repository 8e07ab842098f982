"""Calls that must not be lost: a row before the message, and a sweep that sends the message again.

A TOOL call has no row: its caller sends it again itself when the broker lost it, and nobody
misses it when the caller is gone too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from loguru import logger

from broker_config.call_messages import CallMessage
from broker_config.calls import CallFate, RecordUnknownError
from broker_config.wire import Signer
from nekro_agent.errors import (
    MessageRefusedError,
    MethodDisabledError,
    MethodNotFoundError,
    StorageUnavailableError,
)
from nekro_agent.methods import SandboxMethodType
from storage.calls import Call, CallRequest
from storage.driver_errors import is_refusal
from storage.engine import Database
from storage.states import CallState
from workers.claims import error_of
from workers.publisher import EventPublisher
from workers.registry import Registry

__all__ = ["CallRecords", "CallSweep"]

#: How long a database that does not answer is asked again to write a call down.
RECORD_SECONDS: Final = 5.0
RECORD_PAUSE_SECONDS: Final = 0.2
#: Why a call is cancelled that its caller gave up.
WITHDRAWN: Final = "its caller gave it up"
#: Rows that one sweep takes; the next one goes on.
_BATCH: Final = 500


@dataclass(slots=True)
class _Attempt:
    """How far an attempt to write came."""

    is_sent: bool = False


class CallRecords:
    """Writes down what ``MethodCaller`` publishes; its ``CallLedger``."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry

    def records(self, message: CallMessage) -> bool:
        """Whether it is no TOOL call; a method that is not known here is refused by its worker."""
        return self._type_of(message.invocation.method) not in (None, SandboxMethodType.TOOL)

    async def record(self, message: CallMessage) -> None:
        """Write a call down; a short outage of the database is waited for.

        Raises:
            StorageUnavailableError: the database does not answer; the call is not written down.
            RecordUnknownError: nor does it, and the call may be written down.
        """
        request = self._request(message)
        give_up_at = time.monotonic() + RECORD_SECONDS
        is_in_doubt = False
        while True:
            attempt = _Attempt()
            try:
                return await self._enqueue(request, attempt)
            except StorageUnavailableError as exc:
                is_in_doubt |= attempt.is_sent and not is_refusal(exc)
                if time.monotonic() > give_up_at:
                    if is_in_doubt:
                        raise RecordUnknownError(str(exc)) from exc
                    raise
            await asyncio.sleep(RECORD_PAUSE_SECONDS)

    async def _enqueue(self, request: CallRequest, attempt: _Attempt) -> None:
        async with self._database.autocommit() as transaction:
            attempt.is_sent = True
            if not await transaction.calls.enqueue(request):
                # Its caller left before it was sent; that row says whom to tell and not what to send.
                await transaction.calls.keep_message(request.id, request.invocation or {})

    async def settle(self, message: CallMessage) -> CallFate:
        """Withdraw a call that has not begun; else say how it stands. See ``CallLedger``."""
        async with self._database.autocommit() as transaction:
            call = await transaction.calls.withdraw(self._request(message), reason=WITHDRAWN)
        if call.state is CallState.CANCELLED and call.error_message == WITHDRAWN:
            return CallFate()
        if call.state in (CallState.QUEUED, CallState.RUNNING):
            return CallFate(is_running=True)
        if call.state is CallState.DONE and call.outcome is not None:
            return CallFate(outcome=call.outcome)
        return CallFate(error=error_of(call))

    async def withdraw(self, call_id: str) -> None:
        """Cancel a call that has not ended."""
        async with self._database.autocommit() as transaction:
            await transaction.calls.cancel(call_id, reason=WITHDRAWN)

    def _request(self, message: CallMessage) -> CallRequest:
        invocation = message.invocation
        return CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=self._type_of(invocation.method) or SandboxMethodType.TOOL,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=message.lane,
            deadline=invocation.deadline,
            repeatable=invocation.repeatable,
            invocation=message.to_row(),
        )

    def _type_of(self, method: str) -> SandboxMethodType | None:
        try:
            return self._registry.find(method).type
        except (MethodDisabledError, MethodNotFoundError):
            return None


class CallSweep:
    """Sends recorded calls again that no worker claimed for too long.

    A message may be late instead of lost: where messages wait, workers are behind, and a
    second copy would put them further behind. The claim makes a second copy harmless.
    """

    def __init__(
        self, database: Database, publisher: EventPublisher, signer: Signer, *, waiting_seconds: float
    ) -> None:
        """Take what to sweep with.

        Args:
            waiting_seconds: how long a message may take to a worker that has nothing else to do.
        """
        self._database = database
        self._publisher = publisher
        self._signer = signer
        self._waiting_seconds = waiting_seconds

    async def sweep(self) -> float | None:
        """Send again what is due; when there is more is not known."""
        async with self._database.begin() as transaction:
            calls = await transaction.calls.take_unclaimed(
                waiting_seconds=self._waiting_seconds, limit=_BATCH
            )
        if calls:
            sent = await self._publisher.calls_lost(list(self._messages(calls)))
            logger.bind(unclaimed=len(calls), sent=sent).warning("calls_sent_again")
        return None

    def _messages(self, calls: Iterable[Call]) -> Iterable[CallMessage]:
        for call in calls:
            try:
                yield CallMessage.from_row(call.invocation or {}, signer=self._signer)
            except MessageRefusedError as exc:
                logger.bind(call_id=call.id, error=str(exc)).warning("call_cannot_be_sent_again")
