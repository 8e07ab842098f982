"""Methods that record every execution and end in every way that methods should not."""

import asyncio
import os
import signal
import threading
import time
from typing import Any

from nekro_agent.api import recurring_timer, timer
from nekro_agent.api.plugin import AsyncTaskHandle, NekroPlugin, SandboxMethodType, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.message.message_service import message_service

plugin = NekroPlugin(
    name="Chaos",
    module_name="chaos",
    description="Methods for fault injection.",
    version="1.0.0",
    author="tests",
    url="",
)

ABORTS = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
}


def note(event: str, name: str) -> None:
    """Append one line; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{event} {name} {os.getpid()} {time.time()}\n".encode())
    finally:
        os.close(descriptor)


async def pause(seconds: float) -> None:
    """Wait; a negative number waits until the test releases the calls."""
    if seconds >= 0:
        await asyncio.sleep(seconds)
        return
    released = plugin.get_plugin_data_dir() / "released"
    while not released.exists():
        await asyncio.sleep(0.02)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "work", "Works")
async def work(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Wait and return the name; may run again."""
    note("start", name)
    await pause(seconds)
    note("end", name)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "effect", "Has an effect")
async def effect(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Wait and leave the name in the history; must not run twice."""
    note("start", name)
    await pause(seconds)
    note("end", name)
    return f"effect {name}"


@plugin.mount_sandbox_method(SandboxMethodType.AGENT, "wake", "Wakes the agent")
async def wake(_ctx: AgentCtx, name: str, seconds: float = 0) -> str:
    """Wait and ask for a round; must not run twice."""
    note("start", name)
    await pause(seconds)
    note("end", name)
    return f"wake {name}"


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "die", "Kills its worker")
async def die(_ctx: AgentCtx, name: str, how: str) -> None:
    """End the process that runs this."""
    note("start", name)
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSEGV if how == "segfault" else signal.SIGKILL)
    await asyncio.sleep(60)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "abort", "Raises what is no Exception")
async def abort(_ctx: AgentCtx, kind: str) -> None:
    """Raise a BaseException, or a MemoryError."""
    raise ABORTS[kind]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "block", "Blocks its event loop")
async def block(_ctx: AgentCtx, name: str, seconds: float) -> str:
    """Sleep without awaiting."""
    note("start", name)
    time.sleep(seconds)
    note("end", name)
    return name


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "never", "Never returns")
async def never(_ctx: AgentCtx, name: str) -> None:
    """Refuse to be cancelled."""
    note("start", name)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


def die_once(name: str) -> None:
    """Kill the worker that comes here first."""
    try:
        (plugin.get_plugin_data_dir() / f"died {name}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "tell", "Does what people see")
async def tell(_ctx: AgentCtx, name: str) -> str:
    """Have every effect that people see, and kill the worker after each; may run again."""
    note("start", name)
    chat = _ctx.chat_key
    for number in range(2):
        await _ctx.send_text("equal")
        die_once(f"text {number}")
    for _ in range(2):
        await _ctx.send_text(f"told at {time.time()}")
    for number in range(2):
        path = plugin.get_plugin_data_dir() / f"{time.time()}.txt"
        path.write_text(str(time.time()))
        await _ctx.send_file(str(path))
        die_once(f"file {number}")
    await _ctx.push_system("for the model")
    await message_service.push_system_message(chat, "for the agent", trigger_agent=True)
    die_once("system")
    await message_service.push_bot_message(chat, "said elsewhere")
    await timer.set_timer(chat, -1, "")
    for number in range(2):
        await timer.set_timer(chat, int(time.time()) + 3600, "tea")
        die_once(f"timer {number}")
    await timer.set_temp_timer(chat, int(time.time()) + 3600, "look again")
    await recurring_timer.create_cron_job(chat, "0 9 * * *", "every morning", "UTC")
    die_once("recurring")
    await task.start("quick", name, chat, plugin)
    die_once("job")
    note("end", name)
    return name


@plugin.mount_async_task("quick")
async def quick(handle: AsyncTaskHandle) -> None:
    """End at once."""
    note("job", handle.task_id)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "give", "Returns odd values")
async def give(_ctx: AgentCtx, kind: str) -> Any:
    """Return what cannot travel, or raise without words."""
    if kind == "lock":
        return threading.Lock()
    if kind == "large":
        return b"x" * (50 << 20)
    if kind == "empty":
        raise ValueError
    return kind


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "size", "Measures")
async def size(_ctx: AgentCtx, data: bytes) -> int:
    """Return how many bytes came."""
    return len(data)
