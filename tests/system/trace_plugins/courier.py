"""A job that wakes the agent when it has ended, and one that fails."""

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, task
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Courier", module_name="courier", description="Test jobs.", version="1.0.0", author="tests", url=""
)


@plugin.mount_async_task("carry")
async def carry(handle: AsyncTaskHandle) -> None:
    """Wake the agent."""
    await handle.notify_agent("parcel delivered", trigger=True)


@plugin.mount_async_task("lose")
async def lose(handle: AsyncTaskHandle) -> None:
    """Fail."""
    raise ValueError("lost")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "send_parcel", "Starts a job")
async def send_parcel(_ctx: AgentCtx, kind: str) -> str:
    """Start a job of a kind."""
    await task.start(kind, kind, _ctx.chat_key, plugin)
    return "sent"
