"""The least that an HTTP API with event streams can be: FastAPI publishes each body on Redis pub/sub.

It keeps nothing, checks nothing and knows no user: ``python -m benchmarks.peers.echo_site REDIS_URL PORT``.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from redis.asyncio import Redis

__all__ = ["create_app"]


def create_app(redis_url: str) -> FastAPI:
    """Return the application."""
    app = FastAPI()
    redis = Redis.from_url(redis_url)

    @app.post("/chats/{chat_key}/messages", status_code=202)
    async def post(chat_key: str, request: Request) -> dict[str, bool]:
        await redis.publish(f"echo:{chat_key}", await request.body())
        return {"ok": True}

    @app.get("/chats/{chat_key}/events")
    async def follow(chat_key: str) -> StreamingResponse:
        subscription = redis.pubsub()
        await subscription.subscribe(f"echo:{chat_key}")

        async def frames() -> AsyncIterator[str]:
            yield ": connected\n\n"
            async for message in subscription.listen():
                if message["type"] == "message":
                    yield f"data: {message['data'].decode()}\n\n"

        return StreamingResponse(frames(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
