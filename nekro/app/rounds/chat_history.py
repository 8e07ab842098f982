"""The newest messages of a chat as prompts show them: read in full once, then only new ones."""

from __future__ import annotations

from typing import Any, Final

from nekro.agent.model import HistoryFile, HistoryImage, HistoryMessage
from nekro.app.chats.attachments import Attachment, attachments_of
from nekro_agent.ports import MessageKind
from storage.repositories.messages import Message
from storage.transaction import Transaction

__all__ = ["ANSWER_KEY", "ChatHistory", "shown_message"]

#: Begins the ``once_key`` of a round's answer in words, before the id of the round.
ANSWER_KEY: Final = "answer"


class ChatHistory:
    """The messages that one drain has read; each of its rounds reads only newer ones."""

    def __init__(self, chat_key: str, *, most: int) -> None:
        """Start with an empty history.

        Args:
            most: number of newest messages to show.
        """
        self._chat_key = chat_key
        self._most = most
        #: By sequence, oldest first; None for messages that no prompt shows.
        self._known: dict[int, HistoryMessage | None] = {}
        self._revision = 0

    async def read(self, transaction: Transaction, *, revision: int) -> list[HistoryMessage]:
        """Return the newest messages in their current state, oldest first.

        Args:
            revision: ``ChatInfo.history_revision``; another one than before means that known messages
                were changed or deleted.
        """
        if revision != self._revision:
            self._known.clear()
            self._revision = revision
        last = next(reversed(self._known), 0)
        rows = await transaction.messages.newest(self._chat_key, limit=self._most, since=last)
        # The last known message is returned again, unless the chat was reset or many messages are new.
        if last and (not rows or rows[0].sequence != last):
            self._known.clear()
            if len(rows) < self._most:
                rows = await transaction.messages.newest(self._chat_key, limit=self._most)
        self._known |= {row.sequence: shown_message(row) for row in rows}
        for sequence in list(self._known)[: -self._most]:
            del self._known[sequence]
        return [message for message in self._known.values() if message is not None]


def shown_message(message: Message) -> HistoryMessage | None:
    """Return what the model sees of a message; None for one that is not shown."""
    if message.is_hidden:
        return None
    attachments = attachments_of(message.data or {})
    # The agent made its own pictures; the prompt has their names.
    pictures = [a for a in attachments if a.kind == "image" and message.kind is MessageKind.USER]
    return HistoryMessage(
        message_id=message.id,
        kind=message.kind,
        text=message.text,
        sent_at=message.created_at,
        sequence=message.sequence,
        sender_name=message.sender_name or "",
        sender_id=message.sender_id or "",
        attachments=tuple(HistoryFile(**_facts(a)) for a in attachments if a not in pictures),
        images=tuple(HistoryImage(**_facts(a)) for a in pictures),
        observation_of=_source(message, "observation"),
        answer_of=_source(message, ANSWER_KEY),
    )


def _facts(attachment: Attachment) -> dict[str, Any]:
    return {
        "path": attachment.path,
        "name": attachment.name,
        "media_type": attachment.media_type,
        "size_bytes": attachment.size_bytes,
    }


def _source(message: Message, kind: str) -> str | None:
    """Id of the call whose result, or of the round whose answer the message is; None for other messages."""
    found, _, source_id = (message.once_key or "").partition(":")
    return source_id if found == kind else None
