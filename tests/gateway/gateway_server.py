"""Serves the application of a gateway inside a test's event loop, over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from local_key import local_headers_of
from waiting import WAIT_SECONDS

__all__ = ["served"]


class _Server(uvicorn.Server):
    """Reports when the application has started, or could not start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.has_started.set()


@asynccontextmanager
async def served(
    app: FastAPI, *, http: Any = "auto", with_key: bool = True
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application on a free loopback port, once the application has started.

    Args:
        with_key: send the local key with each request that states no other.
        http: class of uvicorn's protocol.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Server(uvicorn.Config(app, log_config=None, lifespan="on", proxy_headers=False, http=http))
        running = asyncio.create_task(server.serve([listener]))
        await server.has_started.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            # Without certificates, whose loading takes longer than the application's start.
            headers = local_headers_of(app) if with_key else {}
            async with httpx.AsyncClient(
                base_url=url, headers=headers, verify=False, timeout=WAIT_SECONDS
            ) as client:
                yield client
        finally:
            server.should_exit = True
            await running
