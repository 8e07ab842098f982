"""What a server may do while it serves a call: report progress."""

from __future__ import annotations

from connectors.mcp.session import Exchange
from connectors.mcp.texts import line
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["exchange_of"]

_MOST_PROGRESS_CHARS = 200


def exchange_of(ctx: AgentCtx) -> Exchange:
    """Return what the server may do during a call with this context."""
    last = 0.0

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        nonlocal last
        if total:
            last = 100 * progress / total
        ctx.report_progress(last, line(message or "", _MOST_PROGRESS_CHARS))

    return Exchange(on_progress=on_progress)
