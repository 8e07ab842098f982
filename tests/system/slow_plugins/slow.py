"""Methods that run for a given time."""

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Slow", module_name="slow", description="Takes its time.", version="1.0.0", author="tests", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wait_long", "Waits")
async def wait_long(_ctx: AgentCtx, seconds: float) -> float:
    """Wait, and return how long."""
    await asyncio.sleep(seconds)
    return seconds


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fetch_long", "Tells how far it is")
async def fetch_long(_ctx: AgentCtx, seconds: float) -> float:
    """Report progress, and wait."""
    _ctx.report_progress(42, "fetching")
    await asyncio.sleep(seconds)
    return seconds
