"""The HTTP server of a peer: `POST /turns` with a chat and a text is answered with the agent's words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

__all__ = ["Agent", "serve"]

#: Answers a text of a chat.
Agent = Callable[[str, str], Awaitable[str]]


def serve(opened: AbstractAsyncContextManager[Agent], *, port: int) -> None:
    """Serve an agent until a signal ends the process: uvicorn with uvloop and httptools, without a log."""
    import uvicorn
    from fastapi import FastAPI

    agents: list[Agent] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with opened as agent:
            agents.append(agent)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/turns")
    async def post_turn(body: dict[str, Any]) -> dict[str, str]:
        return {"answer": await agents[0](body["chat"], body["text"])}

    uvicorn.run(app, port=port, log_level="warning", access_log=False)
