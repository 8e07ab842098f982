"""The log of effects: what calls did to the world, which the evaluation reads from outside."""

from __future__ import annotations

import json
import os
from typing import Any

from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.api.schemas import AgentCtx

__all__ = ["note_effect"]


def note_effect(plugin: NekroPlugin, ctx: AgentCtx, kind: str, **fields: Any) -> None:
    """Append a line to the plugin's log, in one write, so that lines of several calls do not mix."""
    line = json.dumps({"chat_key": ctx.chat_key, "kind": kind, "fields": fields}) + "\n"
    path = plugin.get_plugin_data_dir() / "effects.jsonl"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
