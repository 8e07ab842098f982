"""A plugin whose directory is brought before a call and stored after it."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Notebook", module_name="notebook", description="Notes.", version="1.0.0", author="tests", url=""
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "note", "Notes a word")
async def note(_ctx: AgentCtx, word: str) -> str:
    """Add a word to a file; returns all words."""
    path = plugin.get_plugin_data_dir() / "notes" / "words"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''} {word}".strip())
    return path.read_text()
