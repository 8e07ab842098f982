"""A chat site in front of a gateway: a page, one route to post, one to follow the events.

    pip install nekro-client fastapi uvicorn
    NEKRO_URL=http://127.0.0.1:8600 NEKRO_DATA_DIR=/srv/nekro uvicorn app:app --port 8080

For a gateway on another host, set NEKRO_KEY instead of NEKRO_DATA_DIR.

The browser talks to this application only, which holds the key and chooses the chat by a cookie.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Body, Cookie, FastAPI, Header, Request
from fastapi.responses import FileResponse, StreamingResponse

from nekro_client import AsyncClient
from nekro_client.models import Message

SHOWN = {"message.received", "message.sent", "turn.ended"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold one client for all requests."""
    async with AsyncClient() as app.state.client:
        yield


app = FastAPI(lifespan=lifespan)
Visitor = Annotated[str, Cookie(pattern="^[0-9a-f]{32}$")]


@app.get("/")
async def page(visitor: Annotated[str | None, Cookie()] = None) -> FileResponse:
    """Serve the page; a new visitor gets a chat."""
    answer = FileResponse(Path(__file__).with_name("page.html"))
    if visitor is None:
        answer.set_cookie("visitor", secrets.token_hex(16), httponly=True, samesite="strict")
    return answer


@app.post("/messages")
async def post(request: Request, visitor: Visitor, text: Annotated[str, Body(embed=True)]) -> Message | None:
    """Post a visitor's message."""
    chat = request.app.state.client.chat(f"site-{visitor}")
    return (await chat.send(text, user_id=visitor, user_name="Visitor")).message


@app.get("/events")
async def follow(
    request: Request, visitor: Visitor, last_event_id: Annotated[int, Header()] = 0
) -> StreamingResponse:
    """Stream a chat's events; a browser that connects again goes on after its last one."""
    events = request.app.state.client.chat(f"site-{visitor}").events(after=last_event_id, live=False)

    async def frames() -> AsyncIterator[str]:
        async with events:
            async for event in events:
                if event.type in SHOWN:
                    yield f"id: {event.number}\ndata: {json.dumps(event.model_dump(mode='json'))}\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
