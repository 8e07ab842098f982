"""What the SDK needs from the system around it: protocols that a runtime implements.

``workers.runtime`` implements them on SQL and Celery, ``nekro_agent.testing`` in memory;
one contract test suite runs on both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

__all__ = [
    "ChatInfo",
    "FileAreas",
    "KeyValueStore",
    "MessageKind",
    "Messages",
    "OutgoingMessage",
    "SystemMessageHooks",
]


class KeyValueStore(Protocol):
    """Durable text values per plugin; ``""`` as chat or user key means "none"."""

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None when there is none."""
        ...

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store durably before returning; True when the key is new, False when it was there."""
        ...

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """True when a value was deleted, False when there was none."""
        ...

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns how many."""
        ...


class MessageKind(StrEnum):
    """Who a message of a chat's history comes from."""

    #: A person wrote it on the platform.
    USER = "user"
    #: The agent said it (``send_text`` and its siblings).
    ASSISTANT = "assistant"
    #: An observation or notice for the LLM; not posted to the platform.
    SYSTEM = "system"


@dataclass(frozen=True, kw_only=True)
class OutgoingMessage:
    """Something a plugin sends into a chat.

    ``file_path`` is a sandbox path (``/app/uploads/…``) after the SDK brought the file there;
    ``file_kind`` is ``"image"`` or ``"file"`` when it is set.
    """

    chat_key: str
    text: str = ""
    file_path: str | None = None
    file_name: str | None = None
    file_kind: str | None = None
    record: bool = True
    reply_to: str | None = None
    call_id: str | None = None
    plugin_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatInfo:
    """What is known of a chat."""

    chat_key: str
    container_key: str
    adapter_key: str | None = None
    channel_id: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None
    created_at: datetime | None = None


class Messages(Protocol):
    """A chat's messages; a row exists before a method returns, an event follows it."""

    async def send(self, message: OutgoingMessage) -> str:
        """Record and deliver a message of the agent; returns its id."""
        ...

    async def push_system(self, chat_key: str, text: str, *, trigger_agent: bool, call_id: str | None) -> str:
        """Record a system message, optionally schedule a round in the same transaction; returns its id."""
        ...


class SystemMessageHooks(Protocol):
    """What runs before a plugin's system message is recorded."""

    async def on_system_message(self, chat_key: str, text: str) -> bool:
        """Run the hooks; True when one of them asked that the message be dropped."""
        ...


class FileAreas(Protocol):
    """Host directories of chats, sandboxes and plugins; every directory exists when returned."""

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory that the chat's sandboxes see, read-only, as ``/app/uploads``."""
        ...

    def shared_dir(self, container_key: str) -> Path:
        """Directory that the sandbox sees as ``/app/shared``."""
        ...

    def plugin_dir(self, plugin_key: str) -> Path:
        """The plugin's own directory, ``<root>/plugins/<key>``."""
        ...
