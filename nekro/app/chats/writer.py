"""The one way to write to a chat: messages and requests of rounds, in the caller's transaction.

Each adds its events to the chat's stream. A round is announced after the commit; if that is lost, the sweep
announces due rounds again. A message to a client of an adapter is queued for it. The module also makes
the contexts of plugins' code from chats, and chats from contexts, and has the effects of timers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from nekro.app.chats.events import message_event, record, record_caused, turn_started
from nekro.broker.tracing import TurnTrace, begin_turn, is_tracing
from nekro.wire.invocation import Invocation
from nekro_agent.execution.current import current_account
from nekro_agent.layout import channel_of
from nekro_agent.ports import ChatInfo, MessageKind
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import Round, RoundRequest
from storage.states import StoredKind, TriggerKind
from storage.timer_services import Firing
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "ChatSource",
    "TimerFirings",
    "append_message",
    "chat_of",
    "context_of",
    "ensure_chat",
    "message_bytes",
    "request_round",
    "trace_of",
]


#: What names a chat and its channel.
ChatSource: TypeAlias = Invocation | ChatInfo | AgentCtx


def context_of(
    source: ChatSource,
    *,
    user_id: str | None,
    plugin_key: str | None = None,
    call_id: str | None = None,
    round_id: str | None = None,
    on_progress: Callable[[float, str], None] | None = None,
) -> AgentCtx:
    """Build the context of a chat, or of a call in it; see ``AgentCtx.for_call``."""
    return AgentCtx.for_call(
        chat_key=source.chat_key,
        container_key=source.container_key or None,
        user_id=user_id,
        adapter_key=source.adapter_key,
        channel_id=source.channel_id,
        channel_name=source.channel_name,
        channel_type=source.channel_type,
        plugin_key=plugin_key,
        call_id=call_id,
        round_id=round_id,
        on_progress=on_progress,
    )


def chat_of(source: ChatSource) -> ChatInfo:
    """Return the chat that an invocation or a context names."""
    return ChatInfo(
        chat_key=source.chat_key,
        container_key=source.container_key or "",
        adapter_key=source.adapter_key,
        channel_id=source.channel_id,
        channel_name=source.channel_name,
        channel_type=source.channel_type,
    )


def trace_of(item: Round) -> TurnTrace:
    """Return the place of a round's turn."""
    return TurnTrace(turn_id=item.turn_id, root_turn_id=item.root_turn_id or item.turn_id)


#: What a chat takes for ever: its rows, and the directories of its areas.
_CHAT_BYTES: Final = 4 << 10


async def append_message(
    transaction: Transaction,
    publisher: EventPublisher,
    new: NewMessage,
    *,
    later: bool = False,
    account_id: str | None = None,
    more_bytes: int = 0,
    is_admitted: bool = False,
) -> Message:
    """Append a message unless its id or ``once_key`` exists, and add its event if it is new.

    The chat is created if it has no row.

    Args:
        later: see ``nekro.app.chats.events.record``.
        account_id: on whose account it is stored; None: no key pays.
        more_bytes: bytes that are stored beside it, such as its file.
        is_admitted: whether it is stored beyond the limit of the key that pays, too.

    Raises:
        StorageQuotaError: at the end of the transaction, the key may not store more.
    """
    await transaction.chats.lock(new.chat_key, create=True)
    row, is_new = await transaction.messages.append(new)
    if is_new:
        if account_id is not None:
            stored, size = transaction.stored_bytes, message_bytes(row)
            stored.add(account_id, StoredKind.MESSAGES, size + more_bytes, refuses=not is_admitted)
            stored.add(account_id, StoredKind.ROUNDS, size, refuses=False)  # its event
        channel = channel_of(row.chat_key)
        if row.kind is MessageKind.ASSISTANT and channel.adapter_key in publisher.adapters:
            await transaction.adapters.add_message(
                row.id, adapter_key=channel.adapter_key, channel_id=channel.channel_id or ""
            )
        await record_caused(transaction, publisher, row.chat_key, message_event(row), later=later)
    return row


def message_bytes(message: NewMessage) -> int:
    """Return what the row of a message takes."""
    data = json.dumps(message.data) if message.data else None
    return ROW_BYTES + size_of(message.text, message.sender_id, message.sender_name, data)


async def ensure_chat(transaction: Transaction, chat_key: str, **known: str | None) -> ChatInfo:
    """Return a chat, locked, as ``ChatRepository.ensure`` does; who causes a new one is charged for it."""
    seen = await transaction.chats.find_locked(chat_key)
    if seen is None:
        size = _CHAT_BYTES + size_of(chat_key)
        transaction.stored_bytes.add(current_account(), StoredKind.CHATS, size)
    return await transaction.chats.ensure(chat_key, seen=seen, **known)


async def request_round(
    transaction: Transaction,
    publisher: EventPublisher,
    request: RoundRequest,
    *,
    message: Message | None = None,
    chat: ChatInfo | None = None,
    during: str | None = None,
    later: bool = False,
) -> Round | None:
    """Request a round, once per trigger, and announce that the chat has one.

    The chat is created if it has no row. Returns None, without a round, if the round would begin a turn in
    a chat where the agent starts none (``ChatInfo.starts_turns``); follow-up rounds are not affected.

    Args:
        message: the message that the round is for, appended in the same transaction; it is recorded as part
            of the round's turn.
        chat: the request's chat as this transaction has read and locked it; None reads it.
        during: request it only while this round runs and is not asked to stop, and the trigger has none; with
            one statement.
        later: announce in the background; the caller does not wait for it.
    """
    await transaction.chats.lock(request.chat_key, create=True)
    if request.number == 1:
        chat = chat or await transaction.chats.get(request.chat_key)
        if not chat.starts_turns:
            return None
    if during is not None:
        new = await transaction.rounds.request_during(request, during)
        if new is None:
            return None
        round_, is_new = new, True
    else:
        round_, is_new = await transaction.rounds.request(request)
    if is_new:
        if message is not None and message.turn_id is None:
            await transaction.messages.name_turn(message.id, round_.turn_id)
            transaction.events.name_turn(round_.chat_key, message_id=message.id, turn_id=round_.turn_id)
        if round_.turn_id == round_.id:
            if round_.key_id:
                await transaction.keys.add_turn(round_.key_id, round_.turn_id)
            record(transaction, publisher, round_.chat_key, turn_started(round_), later=later)
            _trace_after_commit(transaction, round_)
    transaction.after_commit(lambda: publisher.round_requested(request.chat_key, later=later))
    return round_


def _trace_after_commit(transaction: Transaction, first: Round) -> None:
    if is_tracing():

        async def trace() -> None:
            begin_turn(trace_of(first))

        transaction.after_commit(trace)


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
            account_id=firing.account_id,
            delay_seconds=self._debounce_seconds,
        )
        await request_round(transaction, self._publisher, request, message=row)
