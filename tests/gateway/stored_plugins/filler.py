"""A method that fills the shared files of the chat."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Filler", module_name="filler", description="Writes files.", version="1.0.0", author="tests", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fill", "Fills")
async def fill(_ctx: AgentCtx, size: int) -> None:
    """Write a file of so many bytes."""
    (_ctx.fs.shared_path / "large").write_bytes(bytes(size))
