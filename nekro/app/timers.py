"""The effects of a timer's firing."""

from __future__ import annotations

from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, request_round
from nekro_agent.ports import MessageKind
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from storage.timer_services import Firing
from storage.transaction import Transaction

__all__ = ["TimerFirings"]


class TimerFirings:
    """The effects of a firing: a system message with its description, and a round."""

    def __init__(self, publisher: EventPublisher, *, debounce_seconds: float = 0) -> None:
        self._publisher = publisher
        self._debounce_seconds = debounce_seconds

    async def fire(self, transaction: Transaction, firing: Firing) -> None:
        """Record both in the transaction that takes the firing; publish after its commit."""
        message = NewMessage(
            chat_key=firing.chat_key,
            kind=MessageKind.SYSTEM,
            text=firing.text,
            once_key=f"timer:{firing.id}",
        )
        row = await append_message(transaction, self._publisher, message)
        request = RoundRequest(
            chat_key=firing.chat_key,
            trigger_kind=TriggerKind.TIMER,
            trigger_id=firing.id,
            delay_seconds=self._debounce_seconds,
        )
        await request_round(transaction, self._publisher, request, account_id=firing.account_id, message=row)
