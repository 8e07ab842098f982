"""Calls that must not be lost: a row before the message, and a sweep that sends the message again.

A TOOL call has no row: its caller sends it again itself when the broker lost it, and nobody
misses it when the caller is gone too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from loguru import logger

from broker_config.call_messages import CallMessage
from broker_config.wire import Signer
from nekro_agent.errors import (
    MessageRefusedError,
    MethodDisabledError,
    MethodNotFoundError,
    StorageUnavailableError,
)
from nekro_agent.methods import SandboxMethodType
from storage.calls import Call, CallRequest
from storage.engine import Database
from workers.publisher import EventPublisher
from workers.registry import Registry

__all__ = ["CallRecords", "CallSweep"]

#: Rows that one sweep takes; the next one goes on.
_BATCH: Final = 500


class CallRecords:
    """Writes down what ``MethodCaller`` publishes; its ``CallLedger``."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry

    async def record(self, message: CallMessage) -> bool:
        """Write a call down, unless it is one of a TOOL; returns whether it has a row now.

        Raises:
            StorageUnavailableError: the database does not answer; the call must not be published.
        """
        invocation = message.invocation
        kind = self._type_of(invocation.method)
        if kind is None or kind is SandboxMethodType.TOOL:
            return False
        request = CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=kind,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=message.lane,
            deadline=invocation.deadline,
            repeatable=invocation.repeatable,
            invocation=message.to_row(),
        )
        try:
            await self._enqueue(request)
        except StorageUnavailableError:
            # A connection that lay in the pool while the database restarted; the next one is new.
            await self._enqueue(request)
        return True

    async def _enqueue(self, request: CallRequest) -> None:
        async with self._database.autocommit() as transaction:
            if not await transaction.calls.enqueue(request):
                # Its caller left before it was sent; that row says whom to tell and not what to send.
                await transaction.calls.keep_message(request.id, request.invocation or {})

    async def withdraw(self, call_id: str) -> None:
        """Cancel a call that has not ended."""
        async with self._database.autocommit() as transaction:
            await transaction.calls.cancel(call_id, reason="its caller gave it up")

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
