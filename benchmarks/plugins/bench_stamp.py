"""An AGENT method that returns the time of its return, for ``benchmarks.follow_up``."""

from __future__ import annotations

import time

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Stamp",
    module_name="stamp",
    description="Wakes the LLM with the time of day.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, name="stamp", description="Return the time.")
async def stamp(_ctx: AgentCtx) -> str:
    """Return the time as ``returned <seconds since the epoch>``."""
    return f"returned {time.time():.6f}"
