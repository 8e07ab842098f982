"""A plugin with a route, for the test of compose.yaml: its answer names the container that serves it."""

import socket

from fastapi import APIRouter, Request

from nekro_agent.api.plugin import NekroPlugin

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
