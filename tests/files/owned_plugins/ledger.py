"""A plugin whose directory has one owner, and jobs that write there."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing

from nekro_agent.api.plugin import (
    AsyncTaskHandle,
    ConfigBase,
    NekroPlugin,
    SandboxMethodType,
    TaskCtl,
    task,
)
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Ledger", "ledger", "Keeps entries.", "1.0.0", "tests", "")


@plugin.mount_config()
class Config(ConfigBase):
    """Its configuration."""

    PLACE: str = "nowhere"


AT_IMPORT = plugin.get_config(Config).PLACE


def opened() -> sqlite3.Connection:
    """Open its database."""
    entries = sqlite3.connect(plugin.get_plugin_data_dir() / "entries.db", isolation_level=None)
    entries.execute("CREATE TABLE IF NOT EXISTS entries (text TEXT)")
    return entries


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "entries")
async def entries(_ctx: AgentCtx) -> list[str]:
    """Return the host, and what was noted."""
    with closing(opened()) as found:
        return [host(), *(text for (text,) in found.execute("SELECT text FROM entries ORDER BY rowid"))]


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "note")
async def note(_ctx: AgentCtx, text: str) -> None:
    """Note a text."""
    with closing(opened()) as notes:
        notes.execute("INSERT INTO entries VALUES (?)", (text,))


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "place")
async def place(_ctx: AgentCtx) -> list[str]:
    """Return the value of the configuration at import and now."""
    return [AT_IMPORT, plugin.get_config(Config).PLACE]


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "count")
async def count(_ctx: AgentCtx, name: str, most: int) -> str:
    """Start a job that notes numbers."""
    await task.start("count", name, _ctx.chat_key, plugin, most)
    return name


@plugin.mount_async_task("count")
async def count_job(handle: AsyncTaskHandle, most: int) -> AsyncIterator[TaskCtl]:
    """Note numbers, beginning after the last one that is noted."""
    with closing(opened()) as notes:
        (begin,) = notes.execute("SELECT count(*) FROM entries WHERE text LIKE 'job %'").fetchone()
        for number in range(begin, most):
            notes.execute("INSERT INTO entries VALUES (?)", (f"job {number} at {host()}",))
            yield TaskCtl.report_progress(f"{number}", 100 * number / most)
            await asyncio.sleep(0.5)
    yield TaskCtl.success(f"counted to {most}")


def host() -> str:
    """Name of the host."""
    return plugin.get_plugin_data_dir().parent.parent.name
