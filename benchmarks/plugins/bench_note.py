"""A method that does nothing and one that notes a figure, for ``benchmarks.kept_calls``."""

from __future__ import annotations

import os
from pathlib import Path

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Note",
    module_name="note",
    description="Notes figures that code has measured.",
    version="1.0.0",
    author="bench",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="touch", description="Return a text.")
async def touch(_ctx: AgentCtx, text: str) -> str:
    """Return the same text."""
    return text


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="note", description="Note a figure.")
async def note(_ctx: AgentCtx, figure: float) -> None:
    """Append a line to the file that ``BENCH_FIGURES`` names."""
    with Path(os.environ["BENCH_FIGURES"]).open("a") as file:
        file.write(f"{figure!r}\n")
