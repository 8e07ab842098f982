"""Messages from people: runs the hooks, then records the message and requests a round."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import WeakValueDictionary

from loguru import logger

from broker_config.settings import AgentSettings
from nekro.app.calls.fleet_calls import MessageHooks
from nekro.app.calls.waits import answer_question
from nekro.app.chats.writer import append_message, context_of, ensure_chat, request_round
from nekro.app.rounds.stop import RoundStopper, StoppedRounds
from nekro.wire.invocation import new_id
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.execution.current import current_account, effect_id
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind, require_lengths
from nekro_agent.records import UserInfo
from nekro_agent.schemas.chat_message import (
    ChatMessage,
    ChatMessageSegment,
    ChatMessageSegmentType,
    ChatType,
)
from nekro_agent.schemas.signal import MsgSignal
from nekro_agent.shared_clock import shared_now, shared_time
from storage.engine import Database
from storage.repositories.chats import is_stated
from storage.repositories.messages import Message, NewMessage
from storage.repositories.parked_programs import Wait
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind, account_of_key
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["AlsoWrite", "MessageIntake", "Receipt"]

#: Writes further rows in the transaction that has recorded a message and its round; not called if the message
#: was known already.
AlsoWrite: TypeAlias = Callable[[Transaction, Message], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What became of a person's message."""

    #: As recorded.
    message: Message
    #: The turn that it started, or in which the program goes on whose question it answers; None: none.
    turn_id: str | None
    #: Whether an earlier request has recorded it.
    is_repetition: bool = False


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
    """Carries out lines of people that are not for the agent; all of them begin with ``/``."""

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
        #: By ``once_key``, while a message is accepted.
        self._accepting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def receive(self, message: IncomingMessage) -> str | None:
        """Receive a message that a plugin passes on; returns its id, None when a plugin's hook blocked it."""
        # Without a lock: plugins run on several event loops, and an effect has no simultaneous copies.
        once_key = f"pushed:{effect_id('pushed', message.chat_key)}"
        receipt = await self._received(once_key)
        if receipt is None:
            receipt = await self._accept(message, _new(message, once_key=once_key))
        return None if receipt is None else receipt.message.id

    async def accept(
        self,
        message: IncomingMessage | Callable[[], Awaitable[IncomingMessage]],
        *,
        once_key: str | None = None,
        once_digest: bytes | None = None,
        key_id: str | None = None,
        issuer: str | None = None,
        also: AlsoWrite | None = None,
    ) -> Receipt | None:
        """Receive a person's message; None when a plugin's hook blocked it.

        Simultaneous copies in this process wait for each other, so hooks run once for them.

        Args:
            message: it, or what makes it, for example by storing its files; not called for a repetition.
            once_key: a message with the same one is recorded once; the hooks do not run for a repetition.
            once_digest: kept with the message; the caller compares it with that of a repetition.
            key_id: the key of the API on whose budget its turn is.
            issuer: what vouches for the sender's id, so that the message may be a decision on a call, or an
                answer to an MCP server: an adapter, or a key of the API. None for messages that
                plugins push, because code in a sandbox may have written them.

        Raises:
            InvalidValueError: it is too long.
        """
        lock = asyncio.Lock()
        if once_key is not None:
            lock = self._accepting.setdefault(once_key, lock)
        async with lock:
            known = None if once_key is None else await self._received(once_key)
            if known is not None:
                return known
            first = message if isinstance(message, IncomingMessage) else await message()
            new = _new(first, once_key=once_key, once_digest=once_digest)
            return await self._accept(first, new, key_id=key_id, issuer=issuer, also=also)

    async def _accept(
        self,
        message: IncomingMessage,
        new: NewMessage,
        *,
        key_id: str | None = None,
        issuer: str | None = None,
        also: AlsoWrite | None = None,
    ) -> Receipt | None:
        """Receive a message that no request before has recorded, as the row ``new``."""
        require_lengths(new.text, sender_id=new.sender_id, sender_name=new.sender_name, data=new.data)
        if issuer is not None and new.text.lstrip().startswith("/"):
            answer = await self._read(message, issuer)
            if answer is not None:
                return await self._record(message, new, answer=answer, also=also)
        may_answer = issuer is not None
        if not await self._hooks.has_message_hooks():
            return await self._record(
                message, new, wakes=message.is_tome, may_answer=may_answer, key_id=key_id, also=also
            )
        chat = await self._known(message)
        shown = _for_hooks(message, chat, new.id)
        before = shown.changeable()
        signal = await self._hooks.user_message(context_of(chat, user_id=message.user_id), shown)
        if signal is MsgSignal.BLOCK_ALL:
            return None
        if changes := shown.changes_since(before):
            message, new = _as_left(message, new, changes)
        wakes = signal is MsgSignal.FORCE_TRIGGER or (signal is MsgSignal.CONTINUE and bool(message.is_tome))
        may_answer = may_answer and signal is not MsgSignal.BLOCK_TRIGGER
        return await self._record(
            message, new, wakes=wakes, may_answer=may_answer, key_id=key_id, is_known=True, also=also
        )

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

    async def _received(self, once_key: str) -> Receipt | None:
        async with self._database.read() as transaction:
            row = await transaction.messages.find_once(once_key)
        return None if row is None else Receipt(message=row, turn_id=row.turn_id, is_repetition=True)

    async def _known(self, message: IncomingMessage) -> ChatInfo:
        """Return the chat, recorded with the person; both have rows already, except at a first message."""
        async with self._database.read() as transaction:
            chat = await transaction.chats.find(message.chat_key)
            if chat is not None and is_stated(chat, _stated(message)):
                user = await _user(transaction, chat, message)
                if not message.user_id or (user is not None and user.username == message.user_name):
                    return chat
        async with self._database.begin() as transaction:
            return (await _seen(transaction, message))[0]

    async def _record(
        self,
        message: IncomingMessage,
        new: NewMessage,
        *,
        answer: str | None = None,
        wakes: bool = False,
        may_answer: bool = False,
        key_id: str | None = None,
        is_known: bool = False,
        also: AlsoWrite | None = None,
    ) -> Receipt:
        """Record a message and what follows from it, with its chat and its person, in one transaction.

        Args:
            answer: to a line that was carried out; neither wakes the agent.
            may_answer: whether it answers a question of a program that waits for this person; then it begins
                no turn.
            is_known: the chat and the person are recorded, and hooks may have changed them.
        """
        account_id = current_account() if key_id is None else account_of_key(key_id)
        async with self._database.begin() as transaction:
            # Read here and not before the hooks, because a hook may have banned the person.
            if is_known:
                chat = await ensure_chat(transaction, message.chat_key)
                user = await _user(transaction, chat, message)
            else:
                chat, user = await _seen(transaction, message)
            may_trigger = chat.starts_turns and (user is None or user.may_trigger(shared_time()))
            question = None
            if may_answer and may_trigger:
                question = await _question_for(transaction, new, is_to_agent=wakes)
            if wakes and may_trigger and question is None:
                new = dataclasses.replace(new, turn_id=new_id())
            row = await append_message(transaction, self._publisher, new, account_id=account_id)
            if row.id != new.id:  # a copy that another process accepted meanwhile
                return Receipt(message=row, turn_id=row.turn_id, is_repetition=True)
            if question is not None:
                turn_id = await answer_question(transaction, self._publisher, question, row)
                row = dataclasses.replace(row, turn_id=turn_id)
            if answer is not None:
                reply = NewMessage(
                    chat_key=new.chat_key,
                    kind=MessageKind.ASSISTANT,
                    text=answer,
                    once_key=f"decision:{row.id}",
                )
                await append_message(transaction, self._publisher, reply)
            if new.turn_id is not None:
                request = RoundRequest(
                    chat_key=new.chat_key,
                    trigger_kind=TriggerKind.MESSAGE,
                    trigger_id=row.id,
                    id=new.turn_id,
                    account_id=account_id,
                    user_id=new.sender_id,
                    delay_seconds=self._debounce_seconds,
                )
                await request_round(transaction, self._publisher, request, chat=chat)
            if also is not None:
                await also(transaction, row)
        return Receipt(message=row, turn_id=row.turn_id)


async def _question_for(transaction: Transaction, message: NewMessage, *, is_to_agent: bool) -> Wait | None:
    """Return the question of a program that a message answers, None if it answers none.

    A question to everyone is answered by a message to the agent; a command is no answer.
    """
    if message.text.lstrip().startswith("/"):
        return None
    question = await transaction.parked_programs.question_for(message.chat_key, message.sender_id)
    return question if question is not None and (question.subject or is_to_agent) else None


def _stated(message: IncomingMessage) -> dict[str, str | None]:
    return {
        name: getattr(message, name) for name in ("adapter_key", "channel_id", "channel_name", "channel_type")
    }


async def _seen(transaction: Transaction, message: IncomingMessage) -> tuple[ChatInfo, UserInfo | None]:
    """Record the chat and the person of a message; returns both."""
    chat = await ensure_chat(transaction, message.chat_key, **_stated(message))
    if not message.user_id:
        return chat, None
    user = await transaction.records.see_user(
        chat.adapter_key or "", message.user_id, username=message.user_name
    )
    return chat, user


async def _user(transaction: Transaction, chat: ChatInfo, message: IncomingMessage) -> UserInfo | None:
    if not message.user_id:
        return None
    return await transaction.records.find_user(chat.adapter_key or "", message.user_id)


def _new(message: IncomingMessage, **given: Any) -> NewMessage:
    """Return the row of a message; ``given`` are its further columns."""
    return NewMessage(
        chat_key=message.chat_key,
        kind=MessageKind.USER,
        text=message.text,
        sender_id=message.user_id,
        sender_name=message.user_name,
        data=_data(message),
        **given,
    )


def _as_left(
    message: IncomingMessage, new: NewMessage, changes: dict[str, Any]
) -> tuple[IncomingMessage, NewMessage]:
    """Return a message and its row as hooks left it, or both unchanged if that cannot be recorded."""
    try:
        left = ChatMessage.model_validate({"chat_key": message.chat_key, **changes})
        values = {_FIELDS[name]: getattr(left, name) for name in changes}
        changed = dataclasses.replace(message, **values)
        row = _new(changed, id=new.id, once_key=new.once_key, once_digest=new.once_digest)
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
