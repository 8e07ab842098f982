"""Methods of three types, each of which does almost nothing."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Mix", module_name="mix", description="Counts and reports.", version="1.0.0", author="bench", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="count", description="Count one further.")
async def count(_ctx: AgentCtx, number: int) -> int:
    """Return the next number."""
    return number + 1


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, name="note", description="Note a number.")
async def note(_ctx: AgentCtx, number: int) -> str:
    """Return a sentence."""
    return f"noted {number}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, name="report", description="Report to the model.")
async def report(_ctx: AgentCtx, number: int, text: str) -> str:
    """Return a sentence for the next round.

    Args:
        number: of the report.
        text: any text.
    """
    return f"found {number} for {text}"
