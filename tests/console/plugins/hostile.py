"""A plugin all of whose texts try to be markup."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from nekro_agent.api.plugin import ConfigBase, NekroPlugin, SandboxMethodType, TaskCtl
from nekro_agent.api.plugin import task as tasks
from nekro_agent.api.schemas import AgentCtx


def attack(place: str) -> str:
    """A text for a place, which sets a mark if it is interpreted."""
    return f"<img src=x onerror=\"alert('{place}')\"><b id=injected>{place}</b>"


plugin = NekroPlugin(
    attack("plugin-name"),
    "hostile",
    attack("plugin-description"),
    attack("plugin-version"),
    "Eve",
    "javascript:alert(1)",
)


@plugin.mount_config()
class Config(ConfigBase):
    """Settings."""

    TEXT: str = Field(attack("config-value"), title=attack("config-title"), description=attack("config-hint"))
    LINES: list[str] = Field([attack("config-line")], title="Lines")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "weigh_it", attack("method-description"))
async def weigh_it(_ctx: AgentCtx, value: Any = "</code><script>alert('signature')</script>") -> Any:
    """</p><script>alert('method-doc')</script><b id=injected>"""
    return value


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "explode", "Fails")
async def explode(_ctx: AgentCtx, text: str) -> None:
    """Raise."""
    raise RuntimeError(text)


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "whisper", "Wakes the agent")
async def whisper(_ctx: AgentCtx, text: str) -> str:
    """Tell the agent."""
    return text


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "creep", "Reports")
async def creep(ctx: AgentCtx, text: str) -> None:
    """Report progress."""
    ctx.report_progress(50, text)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "buy", attack("approval"), requires_approval=True)
async def buy(_ctx: AgentCtx, what: str) -> str:
    """Buy."""
    return what


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "send", "Sends a file")
async def send(ctx: AgentCtx, name: str, content: str) -> None:
    """Send a file."""
    path = await ctx.fs.mixed_forward_file(content.encode(), file_name=name)
    await ctx.ms.send_file(ctx.chat_key, path, ctx)


@plugin.mount_async_task("lurking")
async def lurking(handle: Any) -> Any:
    """Wait with a hostile message."""
    yield TaskCtl.report_progress(attack("job-message"), 10)
    await handle.wait("go")
    yield TaskCtl.success("done")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "lurk", "Starts a job")
async def lurk(ctx: AgentCtx) -> None:
    """Start a job whose name is hostile."""
    await tasks.start(task_type="lurking", task_id=attack("job-name"), chat_key=ctx.chat_key, plugin=plugin)
