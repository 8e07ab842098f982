"""Methods and a job of every kind, each of which records its start; for restarts under load."""

import asyncio
import os
from collections.abc import AsyncIterator

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, TaskCtl
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Rolling", module_name="rolling", description="Test load.", version="1.0.0", author="tests", url=""
)


def note(line: str) -> None:
    """Append a line to the plugin's journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line} {os.getpid()}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "work", "Works")
async def work(_ctx: AgentCtx, number: int, seconds: float) -> int:
    """Take a while."""
    note(f"work {number}")
    await asyncio.sleep(seconds)
    return number


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "dig", "Works in lane long")
async def dig(_ctx: AgentCtx, number: int, seconds: float) -> int:
    """Take a while, in lane ``long``."""
    note(f"dig {number}")
    await asyncio.sleep(seconds)
    return number


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "keep", "Leaves a text")
async def keep(_ctx: AgentCtx, number: int) -> str:
    """Leave a text in the history."""
    note(f"keep {number}")
    await asyncio.sleep(0.01)
    return f"kept {number}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "wake", "Wakes the agent")
async def wake(_ctx: AgentCtx, name: str) -> str:
    """Wake the agent."""
    note(f"wake {name}")
    await asyncio.sleep(0.05)
    return f"woke {name}"


@plugin.mount_async_task("trek")
async def trek(handle: AsyncTaskHandle) -> AsyncIterator[TaskCtl]:
    """Walk until told to stop; continues elsewhere when its worker stops."""
    note(f"trek {handle.task_id}")
    yield TaskCtl.report_progress("under way", 10)
    await handle.wait("enough")
    yield TaskCtl.success("arrived")
