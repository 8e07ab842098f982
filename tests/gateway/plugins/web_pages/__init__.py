"""Pages beside a pinned plugin's state."""

import os

from fastapi import APIRouter

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(
    name="pages", module_name="web_pages", description="", version="1", author="Ada", url="", webui_path="ui"
)
plugin.pinned = True
count = 0


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="increase", description="")
async def increase(_ctx: AgentCtx) -> int:
    """Count."""
    global count
    count += 1
    return count


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/count")
    async def get_count() -> dict:
        return {"count": count, "pid": os.getpid()}

    return router


@plugin.mount_webhook_method("pages", "pages", "")
async def on_pages(_ctx: AgentCtx):
    """Count too."""
    return [count, os.getpid()]
