"""A plugin that exchanges files with code."""

from nekro_agent.api import message
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, task

plugin = NekroPlugin(name="H", module_name="hosts", description="", version="1", author="tests", url="")


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "write")
async def write(_ctx: AgentCtx, name: str, text: str) -> str:
    """Write a shared file, and send a copy."""
    _ctx.fs.get_file(f"/app/shared/{name}").write_text(text)
    await message.send_file(_ctx.chat_key, f"/app/shared/{name}", _ctx)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "read")
def read(_ctx: AgentCtx, path: str) -> str:
    """Read a file in a thread."""
    return _ctx.fs.get_file(path).read_text()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin")
async def begin(_ctx: AgentCtx, name: str) -> str:
    """Start a job that copies a shared file to an upload."""
    (_ctx.fs.shared_path / name).write_text("for the job")
    await task.start("copy", name, _ctx.chat_key, plugin, name, _ctx.container_key)
    return name


@plugin.mount_async_task("copy")
async def copy(handle: AsyncTaskHandle, name: str, container_key: str) -> TaskCtl:
    ctx = await AgentCtx.create_by_chat_key(handle.chat_key)
    text = (ctx.fs.shared_path / name).read_text()
    await ctx.fs.mixed_forward_file(f"{text}, copied".encode(), f"copied-{name}")
    return TaskCtl.success()
