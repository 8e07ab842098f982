"""A plugin whose ``on_enabled`` hook sets up all kinds of state in memory; it does not declare a pin."""

import asyncio
import os
import threading
import time

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.services.timer.timer_service import timer_service

plugin = NekroPlugin(
    name="Starter",
    module_name="starter",
    description="Sets up its state when it is enabled.",
    version="1.0.0",
    author="tests",
    url="",
)
cache: dict[str, int] = {}
tasks: list[asyncio.Task[None]] = []
turns = {"task": 0, "thread": 0, "scheduler": 0}


def note(line: str) -> None:
    """Append a line to the plugin's journal; O_APPEND keeps lines of several processes whole."""
    path = plugin.get_plugin_data_dir() / "journal.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line} {os.getpid()}\n".encode())
    finally:
        os.close(descriptor)


async def turn_for_ever() -> None:
    while True:
        turns["task"] += 1
        await asyncio.sleep(0.05)


def work_for_ever() -> None:
    while True:
        turns["thread"] += 1
        time.sleep(0.05)


def schedule() -> None:
    """Run again and again without a task, as schedulers of libraries do."""
    turns["scheduler"] += 1
    asyncio.get_running_loop().call_later(0.05, schedule)


async def fired() -> None:
    note("fired")


@plugin.on_enabled()
async def enabled() -> None:
    """Set up a cache, a loop, a thread, a scheduler and timers."""
    note("enabled")
    cache["owner"] = os.getpid()
    tasks.append(asyncio.create_task(turn_for_ever()))
    threading.Thread(target=work_for_ever, daemon=True).start()
    schedule()
    late = int(time.time()) + 86_400
    await timer_service.set_timer("system_starter", late, "tomorrow", silent=True, callback=fired)
    soon = plugin.get_plugin_data_dir() / "soon.txt"
    if soon.exists():
        await timer_service.set_timer("system_starter", int(time.time()) + 1, "soon", callback=fired)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "state")
async def starter_state(_ctx: AgentCtx) -> dict:
    """Return the state in memory of the process that runs this."""
    return {**cache, **turns, "pid": os.getpid()}
