"""`nekro gateway` as a process, which tests kill or stop."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

__all__ = ["KillableGateway", "killable_gateway"]


class KillableGateway:
    """The process, and a client of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        self._process = process
        self.http = httpx.AsyncClient(base_url=json.loads(line)["url"], timeout=60)

    async def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        await self._ended()

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.terminate()
        await self._ended()
        return int(self._process.returncode)

    async def _ended(self) -> None:
        await asyncio.to_thread(self._process.communicate, timeout=WAIT_SECONDS)
        await self.http.aclose()


@asynccontextmanager
async def killable_gateway(fleet: Fleet) -> AsyncIterator[KillableGateway]:
    """A gateway with the settings of a fleet; it is killed at the end if it still runs."""
    gateway = await asyncio.to_thread(
        lambda: KillableGateway(fleet.command("gateway", "--json", "--port", "0"))
    )
    try:
        yield gateway
    finally:
        if gateway._process.poll() is None:
            await gateway.kill()
