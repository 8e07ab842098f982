"""State in the module, and decorated functions that call each other with an explicit context."""

import asyncio

from nekro_agent.api import core, message
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="state", module_name="module_state", description="", version="1", author="Ada", url=""
)

SENT_CACHE: dict[str, list[str]] = {}
_lock = asyncio.Lock()
_rolls = 0


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "发送")
async def send_once(_ctx: AgentCtx, text: str) -> bool:
    """Send a text unless it was the last one."""
    sent = SENT_CACHE.setdefault(_ctx.chat_key, [])
    if text in sent[-1:]:
        core.logger.warning("repeated message dropped")
        return False
    sent.append(text)
    await message.send_text(_ctx.chat_key, text, _ctx)
    return True


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "roll")
async def roll(_ctx: AgentCtx, times: int = 1) -> int:
    """Count, under a lock."""
    global _rolls
    async with _lock:
        before = _rolls
        await asyncio.sleep(0)
        _rolls = before + times
    return _rolls


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "announce")
async def announce_roll(_ctx: AgentCtx) -> str:
    """Call two other methods directly."""
    total = await roll(_ctx, times=2)
    await send_once(_ctx, f"rolled {total}")
    return f"announced {total}"
