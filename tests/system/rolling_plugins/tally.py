"""A pinned plugin with a counter."""

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Tally",
    module_name="tally",
    description="Counts in memory.",
    version="1.0.0",
    author="tests",
    url="",
)
plugin.pinned = True
state = {"count": -1}
turn = asyncio.Lock()


@plugin.mount_init_method()
async def init() -> None:
    """Go on from what was stored."""
    state["count"] = int(await plugin.store.get(store_key="count") or 0)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "tick", "Counts")
async def tick(_ctx: AgentCtx, _number: int) -> int:
    """Count one more."""
    async with turn:  # two concurrent stores may arrive in either order
        state["count"] += 1
        await plugin.store.set(store_key="count", value=str(state["count"]))
        return state["count"]
