"""A method that only waits, for ``benchmarks.waiting_calls``."""

from __future__ import annotations

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Wait",
    module_name="wait",
    description="Waits, so that only the cost of a waiting call is measured.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="wait", description="Wait.")
async def wait(_ctx: AgentCtx, seconds: float) -> float:
    """Return after that many seconds."""
    await asyncio.sleep(seconds)
    return seconds
