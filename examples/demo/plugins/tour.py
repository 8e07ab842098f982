"""A plugin with the one method of the tour that no shipped plugin has: it reads a file of the sandbox."""

from __future__ import annotations

import os

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="Tour",
    module_name="tour",
    description="Reads files that the model's code has written.",
    version="1.0.0",
    author="nekro",
    url="",
)


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "Measure a text", "Count the words of a text file.")
async def measure_text(_ctx: AgentCtx, path: str) -> dict[str, int]:
    """Count the words of a text file.

    Args:
        path (str): A file in `/app/shared` or `/app/uploads`.

    Returns:
        dict[str, int]: words, characters, and process: the id of the process that counted.
    """
    text = _ctx.fs.get_file(path).read_text("utf-8")
    return {"words": len(text.split()), "characters": len(text), "process": os.getpid()}
