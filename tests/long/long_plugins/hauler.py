"""Methods that run until they are released, block, or fail; each records where it ran."""

import asyncio
import os
import time

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType, long_running
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Hauler",
    module_name="hauler",
    description="Test methods that last.",
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


async def let_go(name: str) -> None:
    """Wait until the store says so."""
    while await plugin.store.get(store_key=f"go {name}") is None:
        await asyncio.sleep(0.02)


@long_running
@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "haul", "Lasts")
async def haul(_ctx: AgentCtx, name: str, fails: bool = False) -> str:
    """Last until let go."""
    note(f"haul {name} {os.getpid()}")
    _ctx.report_progress(40, "hauling")
    await let_go(name)
    if fails:
        raise ValueError("the rope broke")
    return f"hauled {name}"


@long_running
@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "study", "Lasts and wakes")
async def study(_ctx: AgentCtx, name: str) -> str:
    """Last until let go, then wake the agent."""
    await let_go(name)
    return f"studied {name}"


@long_running
@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "priorities", "Tells how nice it is")
async def priorities(_ctx: AgentCtx) -> dict[str, int]:
    """Return the niceness of this thread, of one that it starts, and of the process's first."""
    return {
        "job": os.getpriority(os.PRIO_PROCESS, 0),
        "thread": await asyncio.to_thread(os.getpriority, os.PRIO_PROCESS, 0),
        "process": os.getpriority(os.PRIO_PROCESS, os.getpid()),
    }


@long_running
@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "weigh", "Lasts and returns")
async def weigh(_ctx: AgentCtx, name: str) -> int:
    """Last until let go, then return a number."""
    note(f"weigh {name} {os.getpid()}")
    await let_go(name)
    return 42


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "nap", "Blocks its event loop")
async def nap(_ctx: AgentCtx, seconds: float) -> int:
    """Block, as a plugin with requests.get does."""
    time.sleep(seconds)
    return os.getpid()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "ping", "Answers")
async def ping(_ctx: AgentCtx) -> int:
    """Answer at once."""
    return os.getpid()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hang", "Never gives its event loop back")
async def hang(_ctx: AgentCtx) -> None:
    """Block for longer than any caller waits."""
    note(f"hang {os.getpid()}")
    time.sleep(600)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "count", "Waits beside others")
async def count_beside(_ctx: AgentCtx, name: str) -> int:
    """Last until let go; return this process's id."""
    note(f"count {name} {os.getpid()}")
    await let_go(name)
    return os.getpid()


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "carry", "Waits beside others, with an effect")
async def carry_beside(_ctx: AgentCtx, name: str) -> str:
    """Last until let go."""
    note(f"carry {name} {os.getpid()}")
    await let_go(name)
    return f"carried {name}"
