"""Methods for ``benchmarks.heavy_arguments``: one converts its argument to text, one answers at once."""

from __future__ import annotations

from typing import Any

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Weigh",
    module_name="weigh",
    description="Converts its argument to text, as many plugins do.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="weigh", description="Length of a value's text.")
async def weigh(_ctx: AgentCtx, value: Any) -> int:
    """Return the length of ``str(value)``."""
    return len(str(value))


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="pass_back", description="Return a number.")
async def pass_back(_ctx: AgentCtx, number: int) -> int:
    """Return the same number."""
    return number
