"""The methods of a turn, as an ordinary plugin; `benchmarks/agents/methods.py` has those of the peers."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Turn",
    module_name="turn",
    description="Counts, and reports to the model.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="measure", description="Count one further.")
async def measure(_ctx: AgentCtx, number: int, text: str) -> dict[str, int | str]:
    """Return the next number and the same text.

    Args:
        number: where to go on.
        text: any text.
    """
    return {"number": number + 1, "text": text}


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, name="report", description="Report what was found.")
async def report(_ctx: AgentCtx, number: int, text: str) -> str:
    """Return a sentence for the next round.

    Args:
        number: what was found.
        text: any text.
    """
    return f"found {number} for {text}"
