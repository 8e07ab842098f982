"""An unpinned plugin that injects system messages."""

import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Talker", "talker", "Talks.", "1.0.0", "tests", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "say", "Says something")
async def say_to_model(_ctx: AgentCtx, text: str) -> int:
    """Add a system message; return this process's id."""
    await _ctx.push_system(text)
    return os.getpid()
