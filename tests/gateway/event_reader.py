"""A reader of a chat's event stream that connects again, as a browser's ``EventSource`` does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["Frame", "StreamReader", "frames"]


@dataclass(frozen=True)
class Frame:
    """One server-sent event."""

    id: int | None
    event: str
    data: dict[str, Any]
    #: The id as it was sent.
    last_id: str = ""


async def frames(response: httpx.Response) -> AsyncIterator[Frame]:
    """Parse a stream of server-sent events; comments are skipped."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if not line:
            if "data" in fields:
                number = int(fields["id"].partition(".")[0]) if "id" in fields else None
                yield Frame(
                    number, fields.get("event", "message"), json.loads(fields["data"]), fields.get("id", "")
                )
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


@dataclass
class StreamReader:
    """Reads one chat's kept events from any of several gateways until it is cancelled."""

    chat_key: str
    #: Base URLs of gateways; asked in turn after each lost connection.
    urls: Callable[[], list[str]]
    #: With the key.
    headers: dict[str, str]
    #: Numbers in the order of arrival.
    seen: list[int] = field(default_factory=list)
    connections: int = 0
    last_id: str = ""
    #: Numbers after which events were lost, in the order of arrival.
    losses: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Read for ever."""
        limits = httpx.Timeout(30, read=None)
        async with httpx.AsyncClient(headers=self.headers, timeout=limits) as client:
            while True:
                urls = self.urls()
                url = urls[self.connections % len(urls)]
                self.connections += 1
                with contextlib.suppress(httpx.HTTPError):
                    await self._read(client, url)
                await asyncio.sleep(0.1)

    async def _read(self, client: httpx.AsyncClient, url: str) -> None:
        path = f"{url}/api/v1/chats/{self.chat_key}/events"
        headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
        async with client.stream("GET", path, headers=headers, params={"after": 0}) as response:
            if response.status_code == 200:
                async for frame in frames(response):
                    self.last_id = frame.last_id or self.last_id
                    if frame.event == "events.lost":
                        self.losses.append(frame.data["data"]["after"])
                        del self.seen[self.losses[-1] :]
                    elif frame.id is not None:
                        self.seen.append(frame.id)
