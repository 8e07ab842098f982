"""A router, a webhook, and switching on and off."""

from fastapi import APIRouter

from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="web", module_name="web_parts", description="", version="1", author="Ada", url="")

SWITCHES: list[str] = []


@plugin.mount_router()
def create_router() -> APIRouter:
    """Make the router."""
    router = APIRouter()

    @router.get("/status")
    async def status() -> dict:
        return {"ok": True}

    return router


@plugin.mount_webhook_method("push", "push", "a push arrived")
async def on_push(_ctx: AgentCtx):
    """Serve a webhook."""
    return _ctx.webhook_request.body["ref"]


@plugin.on_enabled()
async def enabled():
    """Note it."""
    SWITCHES.append("on")


@plugin.on_disabled()
async def disabled_badly():
    """Fail."""
    raise RuntimeError("no")


@plugin.on_disabled()
async def disabled():
    """Note it, although the other one failed."""
    SWITCHES.append("off")
