"""Background jobs: progress, a wait for a signal, and their ends."""

from typing import AsyncGenerator

from nekro_agent.api.plugin import (
    AsyncTaskHandle,
    NekroPlugin,
    SandboxMethodType,
    TaskCtl,
    task,
)
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="jobs", module_name="with_jobs", description="", version="1", author="Ada", url="")

ENDED: list[str] = []


@plugin.mount_async_task("render")
async def render(handle: AsyncTaskHandle, frames: int, *, ending: str = "success") -> AsyncGenerator[TaskCtl, None]:
    """Render frames, wait for approval, and end as asked."""
    for frame in range(frames):
        yield TaskCtl.report_progress(f"frame {frame}", (frame + 1) * 100 // (frames + 1))
    verdict = await handle.wait("approval", timeout=60)
    await handle.notify_agent(f"render {handle.task_id}: {verdict}")
    if ending == "success":
        yield TaskCtl.success("rendered", data={"frames": frames, "verdict": verdict})
    elif ending == "fail":
        yield TaskCtl.fail("no film", ValueError("empty"))
    elif ending == "raise":
        raise RuntimeError("projector broke")


@plugin.mount_async_task("plain")
async def plain(handle: AsyncTaskHandle, value: int) -> int:
    """Return a value."""
    return value * 2


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "start")
async def start_render(_ctx: AgentCtx, task_id: str, frames: int = 3, ending: str = "success") -> str:
    """Start a job."""
    handle = await task.start(
        "render", task_id, _ctx.chat_key, plugin, frames, ending=ending, on_terminal=lambda c: ENDED.append(c.message)
    )
    return f"started {handle.task_id}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "approve")
async def approve(_ctx: AgentCtx, task_id: str, verdict: str) -> bool:
    """Answer a job's wait; also before it waits."""
    handle = task.get_handle("render", task_id)
    return handle is not None and handle.notify("approval", verdict)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "state")
async def job_state(_ctx: AgentCtx, task_id: str) -> dict:
    """Say how a job is."""
    state = task.get_state("render", task_id)
    return {
        "running": task.is_running("render", task_id),
        "signal": state.signal.value if state else None,
        "message": state.message if state else None,
        "data": state.data if state else None,
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "cancel")
async def cancel_render(_ctx: AgentCtx, task_id: str) -> bool:
    """Cancel a job."""
    return await task.cancel("render", task_id)
