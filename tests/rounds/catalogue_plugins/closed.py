"""Methods that a chat may not use: of another adapter, and not selected for it."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Closed", module_name="closed", description="Selects.", version="1.0.0", author="tests", url=""
)


@plugin.mount_collect_methods()
async def choose(_ctx: AgentCtx) -> list[object]:
    """Select one of two methods."""
    return [opened_vault]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "opened_vault", "")
async def opened_vault(_ctx: AgentCtx) -> str:
    """Look into the vault that is open."""
    return "open"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "closed_vault", "")
async def closed_vault(_ctx: AgentCtx) -> str:
    """Look into the vault that is closed."""
    return "closed"
