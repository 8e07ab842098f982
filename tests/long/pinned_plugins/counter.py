"""A plugin whose state lives in one process: a counter in memory, stored after each step."""

import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Counter",
    module_name="counter",
    description="Counts in memory.",
    version="1.0.0",
    author="tests",
    url="",
)
plugin.pinned = True
state = {"count": -1}


def note(line: str) -> None:
    """Append a line to the plugin's journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_init_method()
async def init() -> None:
    """Go on from what was stored."""
    note(f"init {os.getpid()}")
    state["count"] = int(await plugin.store.get(store_key="count") or 0)


@plugin.mount_cleanup_method()
async def cleanup() -> None:
    """Say goodbye."""
    note(f"cleanup {os.getpid()}")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "bump", "Counts")
async def bump(_ctx: AgentCtx) -> list[int]:
    """Count one more; return it with this process's id."""
    state["count"] += 1
    mine = state["count"]
    await plugin.store.set(store_key="count", value=str(mine))
    return [mine, os.getpid()]
