"""Messages from people: runs the hooks, then records the message and requests a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.app.calls.fleet_calls import MessageHooks
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, context_of, ensure_chat, request_round
from nekro.app.rounds.stop import RoundStopper, StoppedRounds
from nekro.wire.invocation import new_id
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.execution.current import current_account, effect_id
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind, require_lengths
from nekro_agent.schemas.chat_message import (
    ChatMessage,
    ChatMessageSegment,
    ChatMessageSegmentType,
    ChatType,
)
from nekro_agent.schemas.signal import MsgSignal
from nekro_agent.shared_clock import shared_now, shared_time
from storage.accounts.keys import account_of_key
from storage.engine import Database
from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from storage.transaction import Transaction

__all__ = ["MessageIntake", "Receipt"]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What became of a person's message."""

    #: As recorded.
    message: Message
    #: The turn that it started; None if it started none.
    turn_id: str | None


#: Field of a ``ChatMessage`` that hooks may change → that of the message as received.
_FIELDS: Final = {
    "content_text": "text",
    "sender_name": "user_name",
    "sender_nickname": "nickname",
    "is_tome": "is_tome",
    "raw_cq_code": "raw_cq_code",
    "ext_data": "ext_data",
}


class LineReader(Protocol):
    """Carries out lines of people that are not for the agent."""

    async def answer(self, line: str, *, chat_key: str, issuer: str, user_id: str) -> str | None:
        """Carry out a line; returns the answer to the chat, None if the line is for the agent.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        ...


class MessageIntake:
    """Receives messages from people, and resets of a chat."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        hooks: MessageHooks,
        stopper: RoundStopper,
        settings: AgentSettings,
        *,
        readers: Sequence[LineReader],
    ) -> None:
        self._database = database
        self._publisher = publisher
        self._hooks = hooks
        self._stopper = stopper
        self._readers = readers
        self._debounce_seconds = settings.debounce_seconds

    async def receive(self, message: IncomingMessage) -> str | None:
        """Receive a message that a plugin passes on; returns its id, None when a plugin's hook blocked it."""
        once_key = f"pushed:{effect_id('pushed', message.chat_key)}"
        receipt = await self.accept(message, once_key=once_key)
        return None if receipt is None else receipt.message.id

    async def accept(
        self,
        message: IncomingMessage,
        *,
        once_key: str | None = None,
        key_id: str | None = None,
        issuer: str | None = None,
    ) -> Receipt | None:
        """Receive a person's message; None when a plugin's hook blocked it.

        Args:
            once_key: a message with the same one is recorded once; the hooks do not run for a repetition.
            key_id: the key of the API on whose budget its turn is.
            issuer: what vouches for the sender's id, so that the message may be a decision on a call, or an
                answer to an MCP server: an adapter, or a key of the API. None for messages that
                plugins push, because code in a sandbox may have written them.

        Raises:
            InvalidValueError: it is too long.
        """
        known = None if once_key is None else await self._received(once_key)
        if known is not None:
            return known
        new = _new(message, new_id(), once_key)
        require_lengths(new.text, sender_id=new.sender_id, sender_name=new.sender_name, data=new.data)
        chat = await self._known(message)
        if issuer is not None:
            answer = await self._read(message, issuer)
            if answer is not None:
                return await self._answered(new, answer)
        shown = _for_hooks(message, chat, new.id)
        before = shown.changeable()
        signal = await self._hooks.user_message(context_of(chat, user_id=message.user_id), shown)
        if signal is MsgSignal.BLOCK_ALL:
            return None
        if changes := shown.changes_since(before):
            message, new = _as_left(message, new, changes)
        wakes = signal is MsgSignal.FORCE_TRIGGER or (signal is MsgSignal.CONTINUE and bool(message.is_tome))
        return await self._record(new, adapter_key=chat.adapter_key or "", wakes=wakes, key_id=key_id)

    async def reset(self, chat: ChatInfo) -> StoppedRounds:
        """Start a new conversation; returns the rounds that were stopped for it.

        Approvals for the chat or a turn permit no further calls.

        Waits for the running round, so that its last messages stay in the old conversation, but only
        a few seconds: a round whose worker does not answer stops later.
        """
        stopped = await self._stopper.stop(
            chat.chat_key, reason="the chat was reset", wait_seconds=CLOSE_STEP_SECONDS
        )
        async with self._database.begin() as transaction:
            await transaction.chats.reset(chat.chat_key)
            await transaction.approvals.revoke(chat.chat_key)
        await self._hooks.channel_reset(context_of(chat, user_id=None))
        return stopped

    async def _read(self, message: IncomingMessage, issuer: str) -> str | None:
        for reader in self._readers:
            answer = await reader.answer(
                message.text, chat_key=message.chat_key, issuer=issuer, user_id=message.user_id
            )
            if answer is not None:
                return answer
        return None

    async def _answered(self, new: NewMessage, answer: str) -> Receipt:
        """Record a line that was carried out, and the answer to it; neither wakes the agent."""
        reply = NewMessage(
            chat_key=new.chat_key,
            kind=MessageKind.ASSISTANT,
            text=answer,
            once_key=f"decision:{new.id}",
        )
        async with self._database.begin() as transaction:
            row = await append_message(transaction, self._publisher, new, account_id=current_account())
            await append_message(transaction, self._publisher, reply)
        return Receipt(message=row, turn_id=None)

    async def _known(self, message: IncomingMessage) -> ChatInfo:
        """Record the chat and the person of a message; returns the chat."""
        async with self._database.begin() as transaction:
            chat = await ensure_chat(
                transaction,
                message.chat_key,
                adapter_key=message.adapter_key,
                channel_id=message.channel_id,
                channel_name=message.channel_name,
                channel_type=message.channel_type,
            )
            if message.user_id:
                await transaction.records.see_user(
                    chat.adapter_key or "", message.user_id, username=message.user_name
                )
        return chat

    async def _received(self, once_key: str) -> Receipt | None:
        async with self._database.read() as transaction:
            row = await transaction.messages.find_once(once_key)
            if row is None:
                return None
            round_ = await transaction.rounds.find_by_trigger(TriggerKind.MESSAGE, row.id)
        return Receipt(message=row, turn_id=None if round_ is None else round_.turn_id)

    async def _record(self, new: NewMessage, *, adapter_key: str, wakes: bool, key_id: str | None) -> Receipt:
        account_id = current_account() if key_id is None else account_of_key(key_id)
        async with self._database.begin() as transaction:
            row = await append_message(transaction, self._publisher, new, account_id=account_id)
            # Read here and not before the hooks, because a hook may have banned the person.
            if not wakes or not await _may_trigger(transaction, adapter_key, new.sender_id):
                return Receipt(message=row, turn_id=None)
            request = RoundRequest(
                chat_key=new.chat_key,
                trigger_kind=TriggerKind.MESSAGE,
                trigger_id=row.id,
                user_id=new.sender_id,
                delay_seconds=self._debounce_seconds,
            )
            round_ = await request_round(
                transaction, self._publisher, request, account_id=account_id, message=row
            )
        return Receipt(message=row, turn_id=None if round_ is None else round_.turn_id)


async def _may_trigger(transaction: Transaction, adapter_key: str, user_id: str | None) -> bool:
    user = await transaction.records.find_user(adapter_key, user_id) if user_id else None
    return user is None or user.may_trigger(shared_time())


def _new(message: IncomingMessage, message_id: str, once_key: str | None) -> NewMessage:
    return NewMessage(
        chat_key=message.chat_key,
        kind=MessageKind.USER,
        id=message_id,
        text=message.text,
        sender_id=message.user_id,
        sender_name=message.user_name,
        data=_data(message),
        once_key=once_key,
    )


def _as_left(
    message: IncomingMessage, new: NewMessage, changes: dict[str, Any]
) -> tuple[IncomingMessage, NewMessage]:
    """Return a message and its row as hooks left it, or both unchanged if that cannot be recorded."""
    try:
        left = ChatMessage.model_validate({"chat_key": message.chat_key, **changes})
        values = {_FIELDS[name]: getattr(left, name) for name in changes}
        changed = dataclasses.replace(message, **values)
        row = _new(changed, new.id, new.once_key)
        require_lengths(row.text, sender_id=row.sender_id, sender_name=row.sender_name, data=row.data)
    except ValueError as exc:  # a message is never lost because of a hook
        logger.bind(chat_key=message.chat_key, error=str(exc)).warning("message_changes_ignored")
        return message, new
    return changed, row


def _for_hooks(message: IncomingMessage, chat: ChatInfo, message_id: str) -> ChatMessage:
    return ChatMessage(
        chat_key=message.chat_key,
        message_id=message.platform_message_id or message_id,
        sender_id=message.user_id,
        sender_name=message.user_name,
        sender_nickname=message.nickname or message.user_name,
        platform_userid=message.user_id,
        adapter_key=chat.adapter_key or "",
        chat_type=ChatType.of(chat.channel_type),
        is_tome=int(message.is_tome),
        content_text=message.text,
        content_data=[dict(segment) for segment in message.content_data]
        or [ChatMessageSegment(type=ChatMessageSegmentType.TEXT, text=message.text)],
        raw_cq_code=message.raw_cq_code,
        ext_data=dict(message.ext_data),
        send_timestamp=int(shared_now()),
    )


def _data(message: IncomingMessage) -> dict[str, Any] | None:
    """What the row keeps besides its columns: only what differs from the defaults."""
    data = {
        "is_tome": None if message.is_tome else 0,
        "sender_nickname": message.nickname,
        "message_id": message.platform_message_id,
        "content_data": [dict(segment) for segment in message.content_data],
        "ext_data": dict(message.ext_data),
        "raw_cq_code": message.raw_cq_code,
    }
    return {name: value for name, value in data.items() if value or value == 0} or None
