"""A method that only waits, as plugins that call other services do."""

from __future__ import annotations

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Linger", module_name="linger", description="Waits.", version="1.0.0", author="bench", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="linger", description="Wait.")
async def linger(_ctx: AgentCtx, seconds: float) -> float:
    """Wait for ``seconds``."""
    if seconds > 0:
        await asyncio.sleep(seconds)
    return seconds
