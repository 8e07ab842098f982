"""Routes and a webhook in the manner of published plugins."""

import asyncio
import os
import threading

from fastapi import APIRouter, HTTPException, Request, UploadFile
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx

plugin = NekroPlugin(name="shop", module_name="web_shop", description="", version="1", author="Ada", url="")


class Order(BaseModel):
    name: str
    count: int = 1


@plugin.mount_router()
def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse)
    async def index(request: Request) -> str:
        return f"<h1>Shop</h1><a href='{request.url_for('get_order', number=1)}'>first order</a>"

    @router.get("/orders/{number}")
    async def get_order(number: int) -> Order:
        value = await plugin.store.get(store_key=f"order-{number}")
        if value is None:
            raise HTTPException(404, f"no order {number}")
        return Order.model_validate_json(value)

    @router.post("/orders/{number}")
    async def add_order(number: int, order: Order) -> dict:
        await plugin.store.set(store_key=f"order-{number}", value=order.model_dump_json())
        return {"number": number, "pid": os.getpid(), "thread": threading.current_thread().name}

    @router.post("/upload")
    async def upload(file: UploadFile) -> dict:
        content = await file.read()
        return {"name": file.filename, "size": len(content), "type": file.content_type}

    @router.get("/numbers")
    async def numbers(count: int = 3) -> StreamingResponse:
        async def lines():
            for number in range(count):
                yield f"data: {number}\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(lines(), media_type="text/event-stream")

    @router.api_route("/echo", methods=["GET", "POST", "PUT", "DELETE"])
    async def echo(request: Request) -> dict:
        return {
            "method": request.method,
            "query": request.url.query,
            "headers": dict(request.headers),
            "url": str(request.url),
            "body": (await request.body()).decode(),
        }

    @router.get("/cookie")
    async def cookie() -> HTMLResponse:
        answer = HTMLResponse("<script>1</script>")
        answer.set_cookie("mine", "1")
        answer.headers["Service-Worker-Allowed"] = "/"
        return answer

    return router


@plugin.mount_webhook_method("paid", "paid", "an order was paid")
async def on_paid(_ctx: AgentCtx):
    """Note the payment."""
    request = _ctx.webhook_request
    if request.body == {"fail": True}:
        raise ValueError("no such order")
    await plugin.store.set(store_key="paid", value="yes")
    return {
        "body": request.body,
        "agent": request.headers.get("user-agent"),
        "headers": dict(request.headers),
    }


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, name="was_paid", description="")
async def was_paid(_ctx: AgentCtx) -> str:
    """Tell whether the order was paid."""
    return await plugin.store.get(store_key="paid") or "no"
