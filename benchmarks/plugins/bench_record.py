"""A method whose calls are recorded in the database, for ``benchmarks.pooled_calls``."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Record",
    module_name="record",
    description="Answers recorded calls.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, name="record", description="Return a text.")
async def record(_ctx: AgentCtx, text: str) -> str:
    """Return the same text."""
    return text
