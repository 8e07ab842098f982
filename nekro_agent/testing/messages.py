"""Messages in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from nekro_agent.ports import IncomingMessage, MessageKind, OutgoingMessage, require_lengths
from nekro_agent.records import StoredMessage

__all__ = ["InMemoryMessages"]


@dataclass(kw_only=True)
class InMemoryMessages:
    """Implements ``Messages`` and ``Intake``."""

    #: Messages that plugins sent, in order.
    sent: list[OutgoingMessage] = field(default_factory=list)
    #: Every recorded message of every chat, in order.
    history: list[StoredMessage] = field(default_factory=list)
    #: Chats whose agent was triggered, in order.
    triggered: list[str] = field(default_factory=list)
    #: Messages recorded so far, deleted ones included.
    count: int = 0
    #: Ids that messages of plugins were given.
    _ids: set[str] = field(default_factory=set)

    async def send(self, message: OutgoingMessage) -> str:
        """Record a message of the agent."""
        require_lengths(message.text)
        if message.id is not None and not self._is_new(message.id):
            return message.id
        self.sent.append(message)
        if not message.record:
            return f"unrecorded-{len(self.sent)}"
        text = message.text or f"[{message.file_name}]"
        return self.add(message.chat_key, MessageKind.ASSISTANT, text, message_id=message.id)

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message."""
        require_lengths(text)
        if message_id is not None and not self._is_new(message_id):
            return message_id
        if trigger_agent:
            self.triggered.append(chat_key)
        return self.add(chat_key, MessageKind.SYSTEM, text, message_id=message_id)

    async def wake(self, chat_key: str) -> None:
        """Record that the chat's agent was triggered."""
        self.triggered.append(chat_key)

    async def receive(self, message: IncomingMessage) -> str | None:
        """Record a message of a person, without hooks; implements ``Intake``."""
        require_lengths(message.text)
        if message.is_tome:
            self.triggered.append(message.chat_key)
        return self.add(
            message.chat_key,
            MessageKind.USER,
            message.text,
            sender_id=message.user_id,
            sender_name=message.user_name,
            data={"is_tome": int(message.is_tome), "content_data": list(message.content_data)},
        )

    def add(
        self,
        chat_key: str,
        kind: MessageKind,
        text: str,
        *,
        sender_id: str | None = None,
        sender_name: str | None = None,
        message_id: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> str:
        """Record a message, for example one of a person; returns its id."""
        require_lengths(text, sender_id=sender_id, sender_name=sender_name, data=data)
        self.count += 1
        message = StoredMessage(
            sequence=self.count,
            id=message_id or f"m{self.count}",
            chat_key=chat_key,
            kind=kind,
            sender_id=sender_id,
            sender_name=sender_name,
            text=text,
            created_at=datetime.now(UTC),
            data=data,
        )
        self.history.append(message)
        return message.id

    def _is_new(self, message_id: str) -> bool:
        if message_id in self._ids:
            return False
        self._ids.add(message_id)
        return True

    def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        """Return the texts of a chat's messages of one kind."""
        return [m.text for m in self.history if m.chat_key == chat_key and m.kind is kind]
