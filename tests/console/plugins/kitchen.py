"""Methods, a job, a configuration and commands of the console's tests and pictures."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr

from nekro_agent.api import timer
from nekro_agent.api.core import logger
from nekro_agent.api.plugin import ConfigBase, ExtraField, NekroPlugin, SandboxMethodType, TaskCtl
from nekro_agent.api.plugin import task as tasks
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.shared_clock import shared_time

plugin = NekroPlugin("Kitchen", "kitchen", "Recipes, ovens and a shopping list.", "1.4.0", "Ada", "")


class Oven(BaseModel):
    """Where the oven is."""

    url: str = Field("http://oven.local", title="Address")
    password: SecretStr = SecretStr("")


@plugin.mount_config()
class Config(ConfigBase):
    """Settings of the kitchen."""

    LIMIT: int = Field(
        3, ge=1, le=10, title="Most dishes", description="Dishes that are cooked at the same time."
    )
    UNIT: Literal["metric", "imperial"] = Field("metric", title="Units")
    GREETING: str = Field("Dinner is ready.", title="Greeting", description="Sent when a dish is done.")
    IS_QUIET: bool = Field(False, title="Quiet", description="Send no greeting.")
    TAGS: list[str] = Field(["fresh"], title="Tags")
    TOKEN: str = Field("", title="Shop token", json_schema_extra=ExtraField(is_secret=True).model_dump())
    OVEN: Oven = Field(Oven(), title="Oven")


def _picture(width: int, height: int) -> bytes:
    """A PNG with a gradient."""
    rows = b"".join(
        b"\0"
        + bytes(
            v
            for x in range(width)
            for v in (60 + 150 * x // width, 110 + 90 * y // height, 215 - 60 * y // height)
        )
        for y in range(height)
    )
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "recipe", "Finds a recipe")
async def recipe(_ctx: AgentCtx, name: str, portions: int = 2, *, is_vegan: bool = False) -> dict[str, Any]:
    """Find a recipe.

    Args:
        name: Name of the dish.
        portions: For how many people.
        is_vegan: Without animal products.
    """
    return {
        "name": name,
        "portions": portions,
        "is_vegan": is_vegan,
        "grams": 120 * portions,
        "steps": ["wash", "cut", "cook"],
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "weigh", "Weighs")
async def weigh(_ctx: AgentCtx, value: Any) -> Any:
    """Return the value."""
    return value


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "limit", "The limit")
async def limit(_ctx: AgentCtx) -> int:
    """Return the configured limit."""
    return plugin.get_config(Config).LIMIT


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "simmer", "Takes its time")
async def simmer(ctx: AgentCtx, seconds: float, name: str = "soup") -> str:
    """Wait, and report how far it is."""
    for step in range(10):
        ctx.report_progress(step * 10, f"{name}: step {step + 1} of 10")
        await asyncio.sleep(seconds / 10)
    return f"{name} is done"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "burn", "Fails")
async def burn(_ctx: AgentCtx, text: str = "the oven is too hot") -> None:
    """Raise an error."""
    raise RuntimeError(text)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "photo", "Takes a photo")
async def photo(ctx: AgentCtx, name: str = "dish.png") -> str:
    """Send a picture of the dish to the chat."""
    path = await ctx.fs.mixed_forward_file(_picture(480, 270), file_name=name)
    await ctx.ms.send_file(ctx.chat_key, path, ctx)
    return path


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "note", "Writes a file")
async def note(ctx: AgentCtx, name: str, text: str) -> str:
    """Send a text file to the chat."""
    path = await ctx.fs.mixed_forward_file(text.encode(), file_name=name)
    await ctx.ms.send_file(ctx.chat_key, path, ctx)
    return path


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "taste", "Wakes the agent")
async def taste(_ctx: AgentCtx, dish: str) -> str:
    """Taste a dish and tell the agent."""
    return f"{dish}: needs salt"


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "order", "Orders", requires_approval=True)
async def order(_ctx: AgentCtx, what: str, amount: int = 1) -> str:
    """Order something from the shop."""
    return f"ordered {amount} x {what}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "remind", "Sets a timer")
async def remind(ctx: AgentCtx, text: str, seconds: int = 3600) -> bool:
    """Wake the agent later."""
    return await timer.set_timer(ctx.chat_key, int(shared_time().timestamp()) + seconds, text)


@plugin.mount_async_task("baking")
async def baking(handle: Any) -> Any:
    """Bake; a signal lets it go on."""
    logger.info("The oven is hot.")
    for step in range(1, 7):
        yield TaskCtl.report_progress(f"{step * 3} of 40 loaves", step * 7)
        await asyncio.sleep(0.1)
    data = await handle.wait("go")
    yield TaskCtl.success(f"baked, {data}")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "bake", "Starts a job")
async def bake(ctx: AgentCtx, name: str) -> str:
    """Start baking in the background."""
    await tasks.start(task_type="baking", task_id=name, chat_key=ctx.chat_key, plugin=plugin)
    return base64.b16encode(name.encode()).decode()
