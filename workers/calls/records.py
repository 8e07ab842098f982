"""Recorded calls: a row is written before the message, and a sweep sends lost messages again.

A call of a TOOL method that may run twice has no row unless it is detached: its caller repeats it when
the broker lost it, and if the caller has ended the result is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.broker.delivery.messages import CallMessage
from nekro_agent.errors import (
    MessageRefusedError,
)

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher
    from nekro.wire.invocation import Signer
    from storage.engine import Database
    from storage.repositories.calls import Call


__all__ = ["CallSweep"]
#: Most rows of one sweep; the next sweep takes the rest.
_BATCH: Final = 500


class CallSweep:
    """Sends recorded calls again that no worker has claimed within a time limit.

    A message may be delayed and not lost: while messages wait in the queues the workers are
    behind, and second copies would add to the backlog. The claim makes a second copy harmless.
    """

    def __init__(
        self, database: Database, publisher: EventPublisher, signer: Signer, *, waiting_seconds: float
    ) -> None:
        """Create the sweep.

        Args:
            waiting_seconds: how long a message may take to reach an idle worker.
        """
        self._database = database
        self._publisher = publisher
        self._signer = signer
        self._waiting_seconds = waiting_seconds

    async def sweep(self) -> float | None:
        """Send again what is due; always returns None, because the time of the next work is unknown."""
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
