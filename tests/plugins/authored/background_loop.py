"""A loop that init starts and cleanup stops."""

import asyncio

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="loop", module_name="background_loop", description="", version="1", author="Ada", url=""
)

_ticks = 0
_ticked = asyncio.Event()
_task = None


async def _loop():
    global _ticks
    while True:
        _ticks += 1
        _ticked.set()
        await asyncio.sleep(0.001)


@plugin.mount_init_method()
async def start():
    """Start."""
    global _task
    _task = asyncio.create_task(_loop())


@plugin.mount_cleanup_method()
async def stop():
    """Stop."""
    _task.cancel()
    await plugin.store.set(store_key="stopped_after", value=str(_ticks > 0))


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "ticks")
async def wait_for_tick(_ctx: AgentCtx) -> int:
    """Wait until the loop has run once more."""
    before = _ticks
    while _ticks == before:
        _ticked.clear()
        await _ticked.wait()
    return _ticks
