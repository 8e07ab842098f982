"""A plugin that opens its database while it is imported, in every process."""

from __future__ import annotations

import sqlite3

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin("Opened", "opened", "Has a table.", "1.0.0", "tests", "")

ROWS = sqlite3.connect(
    plugin.get_plugin_data_dir() / "rows.db", isolation_level=None, check_same_thread=False
)
ROWS.execute("PRAGMA journal_mode=WAL")
ROWS.execute("CREATE TABLE IF NOT EXISTS texts (text TEXT)")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "add")
async def add(_ctx: AgentCtx, text: str) -> list[str]:
    """Add a row; returns the host and all rows."""
    ROWS.execute("INSERT INTO texts VALUES (?)", (text,))
    found = ROWS.execute("SELECT text FROM texts ORDER BY rowid").fetchall()
    return [plugin.get_plugin_data_dir().parent.parent.name, *(text for (text,) in found)]
