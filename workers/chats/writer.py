"""The one way to write to a chat: messages and requests of rounds, in the caller's transaction.

Each adds its events to the chat's stream. A round is announced after the commit; if that is lost, the sweep
announces due rounds again.
"""

from __future__ import annotations

from messaging.tracing import begin_turn, is_tracing
from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import Round, RoundRequest
from storage.transaction import Transaction
from workers.chats.adapters import queue_send
from workers.chats.events import message_event, record, record_caused, turn_started
from workers.chats.publisher import EventPublisher
from workers.chats.turn_traces import trace_of

__all__ = ["append_message", "request_round"]


async def append_message(
    transaction: Transaction, publisher: EventPublisher, new: NewMessage, *, later: bool = False
) -> Message:
    """Append a message unless its id or ``once_key`` exists, and add its event if it is new.

    The chat is created if it has no row.

    Args:
        later: as of ``workers.chats.events.record``.
    """
    await transaction.chats.lock(new.chat_key, create=True)
    row, is_new = await transaction.messages.append(new)
    if is_new:
        await queue_send(transaction, row)
        await record_caused(transaction, publisher, row.chat_key, message_event(row), later=later)
    return row


async def request_round(
    transaction: Transaction,
    publisher: EventPublisher,
    request: RoundRequest,
    *,
    message: Message | None = None,
    later: bool = False,
) -> Round | None:
    """Request a round, once per trigger, and announce that the chat has one.

    The chat is created if it has no row. Returns None, without a round, if the round would begin a turn in
    a chat where the agent starts none (``ChatInfo.starts_turns``); follow-up rounds are not affected.

    Args:
        message: the message that the round is for, appended in the same transaction; it is recorded as part
            of the round's turn.
        later: announce in the background; the caller does not wait for it.
    """
    await transaction.chats.lock(request.chat_key, create=True)
    if request.number == 1 and not (await transaction.chats.get(request.chat_key)).starts_turns:
        return None
    round_, is_new = await transaction.rounds.request(request)
    if is_new:
        if message is not None and message.turn_id is None:
            await transaction.messages.name_turn(message.id, round_.turn_id)
            transaction.events.name_turn(round_.chat_key, message_id=message.id, turn_id=round_.turn_id)
        if round_.turn_id == round_.id:
            if request.cause_turn_id is not None:
                # The key that started the turn of the cause pays for this one too.
                await transaction.keys.pass_on(request.cause_turn_id, round_.turn_id)
            record(transaction, publisher, round_.chat_key, turn_started(round_), later=later)
            _trace_after_commit(transaction, round_)
    transaction.after_commit(lambda: publisher.round_requested(request.chat_key, later=later))
    return round_


def _trace_after_commit(transaction: Transaction, first: Round) -> None:
    if is_tracing():

        async def trace() -> None:
            begin_turn(trace_of(first))

        transaction.after_commit(trace)
