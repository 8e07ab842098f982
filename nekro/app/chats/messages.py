"""Messages of plugins: a row in the chat's history, then an event for the subscribers that deliver it."""

from __future__ import annotations

from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, request_round
from nekro.wire.invocation import new_id
from nekro_agent.execution.current_call import cause_turn_id, current_call
from nekro_agent.execution.effects import effect_id
from nekro_agent.execution.payer import current_account
from nekro_agent.ports import MessageKind, OutgoingMessage, require_lengths
from storage.driver.outages import outlasting
from storage.engine import Database
from storage.repositories.messages import Message, NewMessage
from storage.repositories.rounds import Round, RoundRequest
from storage.states import TriggerKind
from storage.transaction import Transaction

__all__ = ["SqlMessages"]


class SqlMessages:
    """``nekro_agent.ports.Messages`` on the database and ``agent.events``."""

    def __init__(self, database: Database, publisher: EventPublisher, *, debounce_seconds: float = 0) -> None:
        self._database = database
        self._publisher = publisher
        self._debounce_seconds = debounce_seconds

    async def send(self, message: OutgoingMessage) -> str:
        """Record a message of the agent and announce it, unless its id exists; returns its id.

        Raises:
            InvalidValueError: it is too long.
        """
        data = {
            "file_path": message.file_path,
            "file_name": message.file_name,
            "file_kind": message.file_kind,
            "media_type": message.file_media_type,
            "size_bytes": message.file_size,
            "modified_ns": message.file_modified_ns,
            "reply_to": message.reply_to,
            "hidden": None if message.record else True,
        }
        call = current_call(message.chat_key)
        new = NewMessage(
            id=message.id or new_id(),
            chat_key=message.chat_key,
            kind=MessageKind.ASSISTANT,
            text=message.text,
            data={name: value for name, value in data.items() if value is not None} or None,
            call_id=message.call_id,
            round_id=call.round_id if call else None,
            turn_id=call.turn_id if call else None,
            plugin_key=message.plugin_key,
        )
        return (await self._append(new, more_bytes=message.file_size or 0)).id

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message; with ``trigger_agent`` a round is requested in the same transaction.

        A message from a call continues the turn of the running round, so an agent that triggers
        itself in each round meets the turn's limits.
        """
        call = current_call(chat_key)
        new = NewMessage(
            id=message_id or new_id(),
            chat_key=chat_key,
            kind=MessageKind.SYSTEM,
            text=text,
            call_id=call_id,
            round_id=call.round_id if call else None,
            turn_id=call.turn_id if call else None,
        )
        return (await self._append(new, wake=trigger_agent)).id

    async def wake(self, chat_key: str) -> None:
        """Request a round of the chat's agent without a message."""
        trigger_id = effect_id("wake", chat_key)

        @outlasting
        async def request() -> None:
            async with self._database.begin() as transaction:
                await self._request_round(transaction, chat_key, TriggerKind.MANUAL, trigger_id, None)

        await request()

    @outlasting
    async def _append(self, new: NewMessage, *, wake: bool = False, more_bytes: int = 0) -> Message:
        require_lengths(new.text, data=new.data)
        async with self._database.begin() as transaction:
            row = await append_message(
                transaction, self._publisher, new, account_id=current_account(), more_bytes=more_bytes
            )
            if wake:
                cause = None
                if row.call_id is not None:
                    cause = await transaction.rounds.find_running(row.chat_key)
                await self._request_round(transaction, row.chat_key, TriggerKind.MESSAGE, row.id, cause, row)
        return row

    async def _request_round(
        self,
        transaction: Transaction,
        chat_key: str,
        kind: TriggerKind,
        trigger_id: str,
        cause: Round | None,
        message: Message | None = None,
    ) -> None:
        request = RoundRequest(
            chat_key=chat_key,
            trigger_kind=kind,
            trigger_id=trigger_id,
            turn_id=cause.turn_id if cause else None,
            cause_turn_id=(message.turn_id if message else None) or cause_turn_id(chat_key),
            number=cause.number + 1 if cause else 1,
            user_id=cause.user_id if cause else None,
            delay_seconds=self._debounce_seconds,
        )
        await request_round(
            transaction, self._publisher, request, account_id=current_account(), message=message
        )
