"""A method that declares its context second and swaps the two itself."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="swap", module_name="ctx_second", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "执行")
async def run_console(command: str, _ctx: AgentCtx) -> str:
    """Run a console command.

    Args:
        command: what to run
    """
    if isinstance(command, AgentCtx):
        command, _ctx = _ctx, command
    return f"{command} in {_ctx.chat_key}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "any name")
async def other_name(whatever: AgentCtx, value: int) -> str:
    """Receive the context under another name."""
    return f"{whatever.from_chat_key}:{value}"
