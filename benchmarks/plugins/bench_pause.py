"""A method that only waits, for ``benchmarks.floods``: the plugin that does not flood."""

from __future__ import annotations

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Pause",
    module_name="pause",
    description="Waits, beside the calls of another plugin.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="pause", description="Wait.")
async def pause(_ctx: AgentCtx, seconds: float) -> float:
    """Return after that many seconds."""
    await asyncio.sleep(seconds)
    return seconds
