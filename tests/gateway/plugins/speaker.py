"""Sends texts and files to its chat."""

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="speaker", module_name="speaker", description="", version="1", author="Ada", url="")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="say", description="")
async def say(_ctx: AgentCtx, text: str) -> str:
    """Send a text."""
    await _ctx.ms.send_text(_ctx.chat_key, text, _ctx)
    return "sent"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="show", description="")
async def show(_ctx: AgentCtx, name: str, size: int) -> str:
    """Send a file of so many bytes."""
    path = await _ctx.fs.mixed_forward_file(bytes(index % 251 for index in range(size)), file_name=name)
    await _ctx.ms.send_file(_ctx.chat_key, path, _ctx)
    return path
