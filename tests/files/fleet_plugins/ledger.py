"""A plugin that keeps a database open in its directory, so one worker of the fleet has it."""

from __future__ import annotations

import sqlite3

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Ledger", module_name="ledger", description="Sums.", version="1.0.0", author="tests", url=""
)
_open: list[sqlite3.Connection] = []


@plugin.mount_cleanup_method()
async def close() -> None:
    """Close the database."""
    while _open:
        _open.pop().close()


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "book", "Books an amount")
async def book(_ctx: AgentCtx, amount: int) -> int:
    """Add an amount; returns the sum."""
    if not _open:
        _open.append(sqlite3.connect(plugin.get_plugin_data_dir() / "ledger.db"))
    (database,) = _open
    with database:
        database.execute("CREATE TABLE IF NOT EXISTS amounts (amount INTEGER)")
        database.execute("INSERT INTO amounts VALUES (?)", (amount,))
    return int(database.execute("SELECT sum(amount) FROM amounts").fetchone()[0])
