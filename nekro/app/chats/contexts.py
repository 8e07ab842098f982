"""The contexts in which plugins' code runs, and the chats of calls and contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["OfChat", "chat_of", "context_of"]


class OfChat(Protocol):
    """What names a chat and its channel: a chat, an invocation or a context."""

    @property
    def chat_key(self) -> str: ...

    @property
    def container_key(self) -> str | None: ...

    @property
    def adapter_key(self) -> str | None: ...

    @property
    def channel_id(self) -> str | None: ...

    @property
    def channel_name(self) -> str | None: ...

    @property
    def channel_type(self) -> str | None: ...


def context_of(
    source: OfChat,
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


def chat_of(source: OfChat) -> ChatInfo:
    """Return the chat that an invocation or a context names."""
    return ChatInfo(
        chat_key=source.chat_key,
        container_key=source.container_key or "",
        adapter_key=source.adapter_key,
        channel_id=source.channel_id,
        channel_name=source.channel_name,
        channel_type=source.channel_type,
    )
