"""Methods and jobs that write one line before and one after their work, apart from the engine's records."""

import asyncio
import json
import os
import time

from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import StorageUnavailableError

plugin = NekroPlugin(
    name="Effects",
    module_name="effects",
    description="Methods of the fault harness.",
    version="1.0.0",
    author="tests",
    url="",
)


def note(event: str, call_id: str, name: str) -> None:
    """Append one line; O_APPEND keeps lines of several processes whole."""
    line = {"event": event, "call_id": call_id, "name": name, "pid": os.getpid(), "at": time.time()}
    path = plugin.get_plugin_data_dir() / "effects.jsonl"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{json.dumps(line)}\n".encode())
    finally:
        os.close(descriptor)


async def work_on(ctx: AgentCtx, name: str, seconds: float) -> None:
    """Note the start, wait, note the end."""
    note("start", str(ctx.call_id), name)
    await asyncio.sleep(seconds)
    note("end", str(ctx.call_id), name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "work", "Works")
async def work(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Return the name; may run again."""
    await work_on(_ctx, name, seconds)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "effect", "Has an effect")
async def effect(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Return the name and leave it in the history."""
    await work_on(_ctx, name, seconds)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "approved", requires_approval=True)
async def approved(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Do the same as effect, if a person approves it."""
    await work_on(_ctx, name, seconds)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "wake", "Asks for a round")
async def wake(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Return the name to the agent."""
    await work_on(_ctx, name, seconds)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "fail", "Fails")
async def fail(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Raise the name."""
    await work_on(_ctx, name, seconds)
    raise ValueError(name)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "keep", "Keeps a value")
async def keep(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Store the name under itself."""
    note("start", str(_ctx.call_id), name)
    await asyncio.sleep(seconds)
    await plugin.store.set(store_key=name, value=name)
    note("end", str(_ctx.call_id), name)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "begin_job", "Starts a job")
async def begin_job(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Start a job that must not run twice."""
    note("start", str(_ctx.call_id), name)
    try:
        await task.start("once", name, _ctx.chat_key, plugin, seconds)
    except StorageUnavailableError:  # "the job will not run"
        note("refused", f"job {name}", name)
        raise
    note("end", str(_ctx.call_id), name)
    return name


@plugin.mount_async_task("once", restarts=False)
async def once(handle: AsyncTaskHandle, seconds: float) -> None:
    """Do what must not be done twice."""
    note("start", f"job {handle.task_id}", handle.task_id)
    await asyncio.sleep(seconds)
    note("end", f"job {handle.task_id}", handle.task_id)
