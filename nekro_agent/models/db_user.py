"""The user as plugins of the reference query them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel

if TYPE_CHECKING:
    from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["DBUser"]


class DBUser(BaseModel):
    """One user of a platform."""

    platform_userid: str
    adapter_key: str = ""
    username: str = ""

    @classmethod
    def of_context(cls, ctx: AgentCtx) -> Self | None:
        """Build it from what a context knows; None when nobody triggered the call."""
        if ctx.from_platform_userid is None:
            return None
        return cls(platform_userid=ctx.from_platform_userid, adapter_key=ctx.adapter_key or "")
