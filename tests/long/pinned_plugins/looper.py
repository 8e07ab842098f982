"""An undeclared plugin that leaves a loop running after its init, as many published ones do."""

import asyncio
import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Looper",
    module_name="looper",
    description="Loops in the background.",
    version="1.0.0",
    author="tests",
    url="",
)
state = {"turns": 0}


async def turn_for_ever() -> None:
    while True:
        state["turns"] += 1
        await asyncio.sleep(0.05)


@plugin.mount_init_method()
async def init() -> None:
    """Start the loop."""
    state["task"] = asyncio.create_task(turn_for_ever())


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "turns", "Tells the loop's turns")
async def turns(_ctx: AgentCtx) -> list[int]:
    """Return the turns of this process's loop and its id."""
    return [state["turns"], os.getpid()]
