"""Background jobs that a test controls by signals, and that record their steps."""

import asyncio
import os
from collections.abc import AsyncIterator

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, TaskCtl, task
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Errands",
    module_name="errands",
    description="Test jobs.",
    version="1.0.0",
    author="tests",
    url="",
)


def note(line: str) -> None:
    """Append a line to the plugin's journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_async_task("walk")
async def walk(handle: AsyncTaskHandle, steps: int) -> AsyncIterator[TaskCtl]:
    """Take steps, each when it is told to."""
    for step in range(steps):
        note(f"{handle.task_id} step {step} {os.getpid()}")
        yield TaskCtl.report_progress(f"step {step}", step * 100 // steps)
        await handle.wait(f"go {step}")
    note(f"{handle.task_id} end {os.getpid()}")
    await handle.notify_agent(f"{handle.task_id} walked", trigger=False)
    yield TaskCtl.success("arrived", data={"steps": steps})


@plugin.mount_async_task("pay", restarts=False)
async def pay(handle: AsyncTaskHandle) -> None:
    """Do what must not be done twice."""
    note(f"{handle.task_id} step 0 {os.getpid()}")
    await handle.wait("never")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "begin_walk", "Starts a job")
async def begin_walk(_ctx: AgentCtx, name: str, steps: int) -> bool:
    """Start a walk and say whether it is under way."""
    await task.start("walk", name, _ctx.chat_key, plugin, steps)
    return task.is_running("walk", name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fetch_slowly", "Reports its progress")
async def fetch_slowly(_ctx: AgentCtx) -> str:
    """Report progress, and end when the store says so."""
    _ctx.report_progress(42, "fetching")
    while await plugin.store.get(store_key="enough") is None:
        await asyncio.sleep(0.02)
    return "fetched"
