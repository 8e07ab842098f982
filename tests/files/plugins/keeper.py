"""Methods that download files: to the plugin's own directory, and to the chat's shared files."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.downloads.download import fetch

plugin = NekroPlugin(
    name="Keeper",
    module_name="keeper",
    description="Downloads files.",
    version="1.0.0",
    author="tests",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "keep_own", "Keeps a file")
async def keep_own(_ctx: AgentCtx, url: str, sha256: str = "") -> str:
    """Download to the plugin's directory; returns the SHA-256."""
    target = plugin.get_plugin_data_dir() / "kept"
    return (await fetch(url, target, sha256=sha256 or None)).sha256


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "keep_shared", "Keeps a file for the chat")
async def keep_shared(_ctx: AgentCtx, url: str) -> str:
    """Download to the chat's shared files; returns the SHA-256."""
    return (await fetch(url, _ctx.fs.shared_path / "kept")).sha256
