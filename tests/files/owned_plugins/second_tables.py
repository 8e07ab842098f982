"""One of two plugins that use the database that plugins share."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.core.tortoise_config import resolve_db_url

plugin = NekroPlugin("Tables", "second_tables", "Has a table.", "1.0.0", "tests", "")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "second_add")
async def second_add(_ctx: AgentCtx, text: str) -> list[str]:
    """Add a row; returns the host's directory and all rows."""
    file = resolve_db_url().removeprefix("sqlite://")
    with closing(sqlite3.connect(file, isolation_level=None)) as rows:
        rows.execute("CREATE TABLE IF NOT EXISTS texts (text TEXT)")
        rows.execute("INSERT INTO texts VALUES (?)", (text,))
        found = rows.execute("SELECT text FROM texts ORDER BY rowid").fetchall()
        return [file.split("/")[-3], *(text for (text,) in found)]
