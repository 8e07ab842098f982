"""Messages from people: runs the hooks, then records the message and requests a round."""

from __future__ import annotations

from typing import Final

from broker_config.settings import AgentSettings
from codec.wire import new_id
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.ports import ChatInfo, MessageKind
from nekro_agent.schemas.chat_message import ChatMessage, ChatType
from nekro_agent.schemas.signal import MsgSignal
from nekro_agent.shared_clock import shared_now
from storage.engine import Database
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from workers.chats.publisher import EventPublisher
from workers.chats.writer import append_message, request_round
from workers.rounds.runs import context_of
from workers.rounds.stop import RoundStopper, StoppedRounds

__all__ = ["MessageIntake"]

_WAKING: Final = (MsgSignal.CONTINUE, MsgSignal.FORCE_TRIGGER)


class MessageIntake:
    """Receives messages from people, and resets of a chat."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        host: PluginHost,
        stopper: RoundStopper,
        settings: AgentSettings,
    ) -> None:
        self._database = database
        self._publisher = publisher
        self._host = host
        self._stopper = stopper
        self._debounce_seconds = settings.debounce_seconds

    async def receive(
        self, chat_key: str, text: str, *, user_id: str, user_name: str, file_path: str | None = None
    ) -> str | None:
        """Receive a person's message; returns its id, None when a plugin's hook blocked it.

        Args:
            file_path: sandbox path of a file that belongs to the message.
        """
        chat = await self._chat(chat_key)
        message_id = new_id()
        signal = await self._host.user_message(
            context_of(chat, user_id=user_id),
            ChatMessage(
                chat_key=chat_key,
                message_id=message_id,
                sender_id=user_id,
                sender_name=user_name,
                sender_nickname=user_name,
                platform_userid=user_id,
                adapter_key=chat.adapter_key or "",
                chat_type=ChatType.from_chat_key(chat_key),
                is_tome=1,
                content_text=text,
                send_timestamp=int(shared_now()),
            ),
        )
        if signal is MsgSignal.BLOCK_ALL:
            return None
        new = NewMessage(
            chat_key=chat_key,
            kind=MessageKind.USER,
            id=message_id,
            text=text,
            sender_id=user_id,
            sender_name=user_name,
            data=None if file_path is None else {"file_path": file_path},
        )
        await self._record(new, wake=signal in _WAKING)
        return message_id

    async def reset(self, chat: ChatInfo) -> StoppedRounds:
        """Start a new conversation; returns the rounds that were stopped for it.

        Waits for the running round, so that its last messages stay in the old conversation, but only
        a few seconds: a round whose worker does not answer stops later.
        """
        stopped = await self._stopper.stop(
            chat.chat_key, reason="the chat was reset", wait_seconds=CLOSE_STEP_SECONDS
        )
        async with self._database.begin() as transaction:
            await transaction.chats.reset(chat.chat_key)
        await self._host.channel_reset(context_of(chat, user_id=None))
        return stopped

    async def _chat(self, chat_key: str) -> ChatInfo:
        async with self._database.begin() as transaction:
            return await transaction.chats.ensure(chat_key)

    async def _record(self, new: NewMessage, *, wake: bool) -> None:
        async with self._database.begin() as transaction:
            row = await append_message(transaction, self._publisher, new)
            if wake:
                request = RoundRequest(
                    chat_key=new.chat_key,
                    trigger_kind=TriggerKind.MESSAGE,
                    trigger_id=row.id,
                    user_id=new.sender_id,
                    delay_seconds=self._debounce_seconds,
                )
                await request_round(transaction, self._publisher, request)
