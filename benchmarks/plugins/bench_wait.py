"""A method that waits and does nothing else."""

from __future__ import annotations

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Wait",
    module_name="wait",
    description="Holds a call for a while: what is left is the price of holding it.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="wait", description="Wait.")
async def wait(_ctx: AgentCtx, seconds: float) -> float:
    """Return after that many seconds."""
    await asyncio.sleep(seconds)
    return seconds
