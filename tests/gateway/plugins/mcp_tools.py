"""Methods for the tests of the MCP server; the names are those that the conformance suite calls."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("mcp_tools", "mcp_tools", "For tests of the MCP server.", "1.0.0", "Ada", "")
#: A picture of one pixel.
_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "repeat_with_call")
async def repeat_with_call(ctx: AgentCtx, text: str) -> str:
    """Return the text and the id of the call.

    Args:
        text: what to return.
    """
    return f"{text} in call {ctx.call_id}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "test_simple_text")
async def test_simple_text(_ctx: AgentCtx) -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "test_error_handling")
async def test_error_handling(_ctx: AgentCtx) -> str:
    """Raise."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@plugin.mount_sandbox_method(SandboxMethodType.MULTIMODAL_AGENT, "test_image_content")
async def test_image_content(_ctx: AgentCtx) -> list[dict[str, Any]]:
    """Return a picture."""
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PNG}"}}]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "test_tool_with_progress")
async def test_tool_with_progress(ctx: AgentCtx) -> str:
    """Report progress three times, each when `seen` has said that the last one was seen."""
    for percent in (0, 50, 100):
        ctx.report_progress(percent, f"{percent} of 100")
        key = f"seen-{percent}"
        while await plugin.store.get(chat_key=ctx.chat_key, store_key=key) is None:
            await asyncio.sleep(0.02)
        await plugin.store.delete(chat_key=ctx.chat_key, store_key=key)
    return "done"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "seen")
async def seen(ctx: AgentCtx, percent: int) -> None:
    """Let `test_tool_with_progress` go on."""
    await plugin.store.set(chat_key=ctx.chat_key, store_key=f"seen-{percent}", value="1")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "typed")
async def typed(
    _ctx: AgentCtx,
    text: str,
    number: int = 3,
    *,
    choice: Literal["a", "b"] = "a",
    maybe: float | None = None,
    many: list[str] | None = None,
    table: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Return what it was given."""
    return {"text": text, "number": number, "choice": choice, "maybe": maybe, "many": many, "table": table}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "spread")
async def spread(_ctx: AgentCtx, first: int, /, *rest: int, **named: int) -> list[Any]:
    """Return what it was given."""
    return [first, list(rest), named]


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "advise")
async def advise(ctx: AgentCtx) -> str:
    """Return a text for the model."""
    return f"look at {ctx.chat_key}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hold")
async def hold(ctx: AgentCtx, name: str, seconds: float = 60) -> str:
    """Wait, and keep in the store that it began and how it ended."""
    await plugin.store.set(chat_key=ctx.chat_key, store_key=name, value="began")
    end = "stopped"
    try:
        await asyncio.sleep(seconds)
        end = "returned"
    finally:
        await plugin.store.set(chat_key=ctx.chat_key, store_key=name, value=end)
    return end


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "held")
async def held(ctx: AgentCtx, name: str) -> str | None:
    """Return what ``hold`` kept."""
    return await plugin.store.get(chat_key=ctx.chat_key, store_key=name)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "large")
async def large(_ctx: AgentCtx, size: int) -> str:
    """Return a text of so many characters."""
    return "x" * size


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "picture")
async def picture(ctx: AgentCtx) -> str:
    """Store a picture in the chat."""
    return await ctx.fs.mixed_forward_file(base64.b64decode(_PNG), file_name="dot.png")
