"""A plugin with a route and files, for the test of compose.yaml: it names the container that serves it."""

import socket
from pathlib import Path

from fastapi import APIRouter, Request

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="where", module_name="where", description="", version="1", author="Probe", url="")


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.post("/where")
    async def where(request: Request) -> dict:
        return {
            "host": socket.gethostname(),
            "body": (await request.body()).decode(),
            "has_key": "authorization" in request.headers,
        }

    return router


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "count")
async def count(_ctx: AgentCtx, path: str) -> dict:
    """Add a line to a file of the caller, and one to the plugin's own file; returns both and the container.

    Args:
        path: the caller's file.
    """
    own = plugin.get_plugin_data_dir() / "lines"
    files = [_ctx.fs.get_file(path), own]
    for file in files:
        with open(file, "a") as lines:
            lines.write(f"{socket.gethostname()}\n")
    texts = [Path(file).read_text() for file in files]
    return {"host": socket.gethostname(), "file": texts[0], "own": texts[1]}
