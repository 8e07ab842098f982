"""A gateway in a process of its own, which tests may kill."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import Settings
from cli.environment import environment_of

__all__ = ["KillableGateway", "killable_gateway"]

_SCRIPT = """
import sys, uvicorn
from broker_config.settings import Settings
from gateway.app import create_app
uvicorn.run(create_app(Settings.load()), fd=int(sys.argv[1]), log_config=None)
"""


class KillableGateway:
    """The process, and a client of it."""

    def __init__(self, settings: Settings) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        descriptor = self._listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SCRIPT, str(descriptor)],
            env=environment_of(settings),
            pass_fds=[descriptor],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    async def ready(self) -> None:
        async def answers() -> bool:
            assert self._process.poll() is None, "the gateway ended"
            return (await self.http.get("/healthz")).status_code == 200

        await eventually(answers, what="the gateway answers")

    async def kill(self) -> None:
        """SIGKILL, and close the socket that would otherwise accept connections for nobody."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait, WAIT_SECONDS)
        self._listener.close()
        await self.http.aclose()


@asynccontextmanager
async def killable_gateway(settings: Settings) -> AsyncIterator[KillableGateway]:
    """A gateway that answers; it is killed at the end."""
    process = KillableGateway(settings)
    try:
        await process.ready()
        yield process
    finally:
        await process.kill()
