"""Methods and hooks for the tests of rounds."""

import asyncio
import os

from nekro_agent.api import message
from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.api.signal import MsgSignal

plugin = NekroPlugin(
    name="Scene", module_name="scene", description="Test methods.", version="1.0.0", author="tests", url=""
)


def note(line: str) -> None:
    """Append a line to the journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "mark", "Notes a number")
async def tick(_ctx: AgentCtx, name: str) -> str:
    """Write a name into the journal."""
    note(f"tick {name}")
    return name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "hold", "Does not end")
async def hold(_ctx: AgentCtx, name: str) -> None:
    """Note the beginning, wait until cancelled, note that."""
    note(f"begin {name}")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        note(f"cancelled {name}")
        raise


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "snooze", "Takes longer than its caller waits")
async def snooze(_ctx: AgentCtx, name: str) -> str:
    """Return the name after ten seconds."""
    await asyncio.sleep(10)
    note(f"woke {name}")
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "linger", "Does not end, and has an effect")
async def linger(_ctx: AgentCtx, name: str) -> str:
    """Like hold, as a call that is claimed."""
    await hold(_ctx, name)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "keep", "Leaves a text")
async def keep(_ctx: AgentCtx, text: str) -> str:
    """Leave a text in the history."""
    note(f"keep {text}")
    return f"kept {text}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "look", "Wakes the agent")
async def look(_ctx: AgentCtx, topic: str) -> str:
    """Look something up."""
    note(f"look {topic}")
    return f"seen: {topic}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "nag", "Wakes the agent by a message")
async def nag(_ctx: AgentCtx, chat_key: str = "") -> None:
    """Push a system message that wakes the agent, each time."""
    await message.push_system(chat_key or _ctx.chat_key, "nagging", _ctx, trigger_agent=True)


@plugin.mount_async_task("brewing")
async def brewing(_handle: AsyncTaskHandle) -> None:
    """No worker of the bench runs it."""


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "brew", "Starts a job and cancels it")
async def brew(_ctx: AgentCtx, name: str) -> None:
    """Start a job, and end it before a worker has begun it."""
    handle = await task.start("brewing", name, _ctx.chat_key, plugin)
    await message.send_text(_ctx.chat_key, name, _ctx)
    assert await task.cancel("brewing", handle.task_id)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "break_down", "Raises")
async def break_down(_ctx: AgentCtx, text: str) -> None:
    """Raise a ValueError."""
    raise ValueError(text)


@plugin.mount_on_user_message()
async def judge(_ctx: AgentCtx, said: message.ChatMessage) -> MsgSignal | None:
    """Answer as the message asks for."""
    note(f"heard {said.content_text}")
    signals = {
        "quietly:": MsgSignal.BLOCK_TRIGGER,
        "drop:": MsgSignal.BLOCK_ALL,
        "now:": MsgSignal.FORCE_TRIGGER,
    }
    return signals.get(said.content_text.split(" ")[0])
