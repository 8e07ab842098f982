"""An ordinary init, a thread of its own, and API calls from threads and from loops of their own."""

import asyncio
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from nekro_agent.api import core
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("own threads", "own_threads", "", "1", "Ada", "")
plugin.pinned = True
jobs: "queue.Queue[tuple[str, threading.Event]]" = queue.Queue()
written: list[str] = []
pool = ThreadPoolExecutor(2)
where = {"started": False, "debug": os.environ.get("OWN_THREADS_DEBUG", "no"), "path": os.environ["PATH"] != ""}


def work() -> None:
    while True:
        text, done = jobs.get()
        (plugin.get_plugin_data_dir() / "written.txt").write_text(text, "utf-8")
        written.append(text)
        core.logger.bind(text=text).opt(depth=1).success("written {}", text)
        done.set()


@plugin.mount_init_method()
def init():
    where["started"] = True
    threading.Thread(target=work, daemon=True).start()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "queue")
async def write_by_thread(_ctx: AgentCtx, text: str) -> list[str]:
    """Hand work to the thread that init started and wait for it."""
    done = threading.Event()
    jobs.put((text, done))
    await asyncio.get_event_loop().run_in_executor(pool, done.wait, 10)
    return written


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "own loop")
def count_with_own_loop(_ctx: AgentCtx, key: str) -> int:
    """An ordinary function that brings its own event loop for the API's coroutines."""

    async def count() -> int:
        number = int(await plugin.store.get(store_key=key) or 0) + 1
        await plugin.store.set(store_key=key, value=str(number))
        await _ctx.send_text(f"counted to {number}")
        return number

    return asyncio.run(count())


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "back to the loop")
async def count_from_pool(_ctx: AgentCtx, key: str) -> str | None:
    """A thread that hands a coroutine back to the loop of the call."""
    loop = asyncio.get_running_loop()

    def from_thread() -> str | None:
        asyncio.run_coroutine_threadsafe(plugin.store.set(store_key=key, value="7"), loop).result(60)
        return asyncio.run_coroutine_threadsafe(plugin.store.get(store_key=key), loop).result(60)

    return await asyncio.to_thread(from_thread)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "where")
async def own_threads_where(_ctx: AgentCtx) -> dict:
    """What import and init found."""
    return where
