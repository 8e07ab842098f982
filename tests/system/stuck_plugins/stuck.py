"""A thread and a cleanup hook that do not end when their worker stops."""

import asyncio
import threading
import time

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Stuck", module_name="stuck", description="Does not end.", version="1.0.0", author="tests", url=""
)
never = threading.Event()
is_cleanup_stuck = False


def sleep_forever() -> None:
    """Never end."""
    while True:
        time.sleep(3600)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "leave_thread", "Leaves a thread")
async def leave_thread(_ctx: AgentCtx) -> str:
    """Leave a thread of the loop's executor that never ends; Python waits for those at its exit."""
    asyncio.get_running_loop().run_in_executor(None, sleep_forever)
    return "left"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "block_cleanup", "Has the cleanup block")
async def block_cleanup(_ctx: AgentCtx) -> str:
    """Have the cleanup hook block the worker's loop."""
    global is_cleanup_stuck
    is_cleanup_stuck = True
    return "set"


@plugin.mount_cleanup_method()
async def clean_up() -> None:
    """Block the loop, if told to."""
    if is_cleanup_stuck:
        never.wait()
