"""The method ``probe`` as an ordinary plugin."""

from __future__ import annotations

from typing import Any

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe",
    module_name="probe",
    description="Answers at once, so that only the cost of a call is measured.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="probe", description="Count one further.")
async def probe(_ctx: AgentCtx, number: int, text: str) -> dict[str, Any]:
    """Return the next number and the same text."""
    return {"number": number + 1, "text": text}
