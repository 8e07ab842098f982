"""Routes and webhooks that block, crash, stream for ever and ignore their client."""

import asyncio
import os
import time

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from nekro_agent.api.plugin import NekroPlugin
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="bad", module_name="web_bad", description="", version="1", author="Ada", url="")
closed = 0


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/block")
    async def block(seconds: float) -> dict:
        time.sleep(seconds)
        return {}

    @router.get("/crash")
    async def crash() -> dict:
        os._exit(9)

    @router.get("/for-ever")
    async def for_ever() -> StreamingResponse:
        async def lines():
            global closed
            try:
                while True:
                    yield b"x" * 1024
                    await asyncio.sleep(0.01)
            finally:
                closed += 1

        return StreamingResponse(lines())

    @router.get("/closed")
    async def how_many_closed() -> int:
        return closed

    @router.get("/silent")
    async def silent() -> dict:
        await asyncio.sleep(3600)
        return {}

    @router.get("/raises")
    async def raises(error: str) -> dict:
        kinds = {"ValueError": ValueError, "CancelledError": asyncio.CancelledError, "SystemExit": SystemExit}
        raise kinds[error]("secret of the plugin")

    @router.get("/half")
    async def half() -> StreamingResponse:
        async def lines():
            yield b"first part"
            raise RuntimeError("broken")

        return StreamingResponse(lines())

    return router


@plugin.mount_webhook_method("paid", "paid too", "")
async def on_paid(_ctx: AgentCtx):
    """Be slow or blocking if the request says so."""
    body = _ctx.webhook_request.body
    if isinstance(body, dict) and "sleep" in body:
        await asyncio.sleep(body["sleep"])
    if isinstance(body, dict) and "block" in body:
        time.sleep(body["block"])
    if isinstance(body, dict) and "crash" in body:
        os._exit(9)
    return "noted"
