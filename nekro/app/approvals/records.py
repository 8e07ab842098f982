"""The events of approvals. The transaction must have locked the chat."""

from __future__ import annotations

from typing import Any, Final

from nekro.app.approvals.shown import shown_call
from nekro.app.chats.events import record_caused
from nekro.app.chats.publisher import EventPublisher
from storage.access.approvals import Approval
from storage.repositories.events import NewEvent
from storage.states import EventType
from storage.transaction import Transaction

__all__ = ["record_decided", "record_requested"]

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
