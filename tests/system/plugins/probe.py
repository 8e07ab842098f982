"""Methods that report their executions to the tests."""

import asyncio
import os
from typing import Any

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Probe",
    module_name="probe",
    description="Test methods.",
    version="1.0.0",
    author="tests",
    url="",
)


def note(line: str) -> None:
    """Append a line to the plugin's journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "add", "Adds")
async def add(_ctx: AgentCtx, a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "journal", "Journals")
async def journal(_ctx: AgentCtx, number: int) -> int:
    """Write a number into the journal and return this process's id."""
    note(str(number))
    await asyncio.sleep(0)
    return os.getpid()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "who", "Tells the context")
async def who(_ctx: AgentCtx) -> dict[str, Any]:
    """Return what the context says."""
    return {"chat": _ctx.chat_key, "user": _ctx.from_user_id, "container": _ctx.container_key}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "give_lock", "Returns what cannot be pickled")
async def give_lock(_ctx: AgentCtx) -> Any:
    """Return an object that no message can carry."""
    import threading

    return threading.Lock()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fail_with", "Raises")
async def fail_with(_ctx: AgentCtx, text: str) -> None:
    """Raise a ValueError."""
    raise ValueError(text)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "length", "Measures")
async def length(_ctx: AgentCtx, data: bytes) -> int:
    """Return how many bytes came."""
    return len(data)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "read_text", "Reads a sandbox file")
async def read_text(_ctx: AgentCtx, path: str) -> str:
    """Read a file of the sandbox."""
    return _ctx.fs.get_file(path).read_text("utf-8")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "write_text", "Makes a file for the sandbox")
async def write_text(_ctx: AgentCtx, name: str, text: str) -> str:
    """Write a file into the plugin's own directory and bring it into the sandbox."""
    own = plugin.get_plugin_data_dir() / name
    own.write_text(text, "utf-8")
    return await _ctx.fs.mixed_forward_file(own, file_name=name)


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "remember", "Leaves a text")
async def remember(_ctx: AgentCtx, text: str) -> str:
    """Leave a text in the history."""
    note(f"remember {text}")
    return f"remembered {text}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "look_up", "Wakes the agent")
async def look_up(_ctx: AgentCtx, topic: str) -> str:
    """Look something up."""
    note(f"look_up {topic}")
    return f"all about {topic}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "count_up", "Wakes the agent with a dict")
async def count_up(_ctx: AgentCtx, number: int) -> dict[str, int]:
    """Return a dict from an AGENT method, as published plugins do."""
    return {"next": number + 1}


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "leave", "Ends the task badly")
async def leave(_ctx: AgentCtx) -> None:
    """Raise what is not an ordinary exception."""
    raise SystemExit(3)
