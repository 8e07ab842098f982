"""The chat as plugins of the reference query it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["DBChatChannel"]


class DBChatChannel(BaseModel):
    """One chat."""

    chat_key: str
    adapter_key: str = ""
    channel_id: str = ""
    channel_name: str = ""
    channel_type: str = ""

    @classmethod
    def of_context(cls, ctx: AgentCtx) -> Self:
        """Build it from what a context knows."""
        return cls(
            chat_key=ctx.chat_key,
            adapter_key=ctx.adapter_key or "",
            channel_id=ctx.channel_id or "",
            channel_name=ctx.channel_name or "",
            channel_type=ctx.channel_type or "",
        )
