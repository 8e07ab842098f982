"""A plugin that sleeps until it is woken, with a method of a built-in name."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Sleepy", module_name="sleepy", description="Sleeps.", version="1.0.0", author="tests", url="",
    allow_sleep=True, sleep_brief="Paints pictures.",
)  # fmt: skip


@plugin.mount_prompt_inject_method("state")
async def state(_ctx: AgentCtx) -> str:
    """Add a line to prompts."""
    return "The easel is ready."


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "paint", "")
async def paint(_ctx: AgentCtx, what: str) -> str:
    """Paint a picture of something."""
    return f"a picture of {what}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "own_help", "")
async def help_of(_ctx: AgentCtx) -> str:
    """Help of the plugin itself."""
    return "own help"
