"""The one way to write to a chat: messages and requests of rounds, in the caller's transaction.

Both are announced after the commit. A lost announcement delays the reader: subscribers read the rows in
order of their sequence, and the sweep announces due rounds again.
"""

from __future__ import annotations

from typing import Any, Final

from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import Round, RoundRequest
from storage.transaction import Transaction
from workers.chats.publisher import EventPublisher

__all__ = ["append_message", "request_round"]

#: Event of each new message of a chat; its body names the row, subscribers read in order of ``sequence``.
MESSAGE_EVENT: Final = "message.added"


async def append_message(
    transaction: Transaction, publisher: EventPublisher, new: NewMessage, *, later: bool = False
) -> Message:
    """Append a message unless its id or ``once_key`` exists, and announce it if it is new.

    The chat is created if it has no row.

    Args:
        later: announce in the background; the caller does not wait for it.
    """
    await transaction.chats.lock(new.chat_key, create=True)
    row, is_new = await transaction.messages.append(new)
    if is_new:
        body: dict[str, Any] = {
            "id": row.id,
            "sequence": row.sequence,
            "kind": row.kind.value,
            "chat_key": row.chat_key,
        }
        transaction.after_commit(lambda: publisher.event(MESSAGE_EVENT, row.chat_key, body, later=later))
    return row


async def request_round(
    transaction: Transaction, publisher: EventPublisher, request: RoundRequest, *, later: bool = False
) -> Round | None:
    """Request a round, once per trigger, and announce that the chat has one.

    The chat is created if it has no row. Returns None, without a round, if the round would begin a turn in
    a chat where the agent starts none (``ChatInfo.starts_turns``); follow-up rounds are not affected.

    Args:
        later: announce in the background; the caller does not wait for it.
    """
    await transaction.chats.lock(request.chat_key, create=True)
    if request.number == 1 and not (await transaction.chats.get(request.chat_key)).starts_turns:
        return None
    round_, _ = await transaction.rounds.request(request)
    transaction.after_commit(lambda: publisher.round_requested(request.chat_key, later=later))
    return round_
