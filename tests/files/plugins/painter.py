"""Methods that read and write shared files of the chat, on the host of their worker."""

from __future__ import annotations

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Painter",
    module_name="painter",
    description="Changes files.",
    version="1.0.0",
    author="tests",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "paint", "Paints")
async def paint(_ctx: AgentCtx, path: str) -> str:
    """Read a file, change it, and leave another one; returns the path of a third."""
    data = _ctx.fs.get_file(path)
    text = data.read_text()
    data.write_text(f"{text},changed")
    (_ctx.fs.shared_path / "picture.png").write_text(f"picture of {text}")
    return await _ctx.fs.mixed_forward_file(f"upload of {text}".encode(), file_name="upload.png")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "paint_in_thread", "Paints on a thread")
def paint_in_thread(_ctx: AgentCtx, path: str) -> None:
    """Change a file, in a function that the worker runs on a thread."""
    data = _ctx.fs.get_file(path)
    data.write_text(data.read_text().upper())
