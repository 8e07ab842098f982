"""A client of the SSE adapter protocol, written from its description."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from waiting import WAIT_SECONDS

__all__ = ["ACCESS_KEY", "PATH", "SseClient"]

ACCESS_KEY = "the-access-key"
PATH = "/api/adapters/sse/connect"


class SseClient:
    """One client; ``connected`` streams while a block lasts."""

    def __init__(self, http: httpx.AsyncClient, *, platform: str = "wx") -> None:
        self.http, self.platform = http, platform
        self.id = ""
        self.events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()

    async def command(self, cmd: str, **fields: Any) -> dict[str, Any]:
        headers = {"X-Access-Key": ACCESS_KEY, "X-Client-ID": self.id, "Content-Type": "application/json"}
        # In ASCII, because UTF-8 has no lone surrogates.
        answer = await self.http.post(PATH, content=json.dumps({"cmd": cmd, **fields}), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def register(self) -> None:
        answer = await self.command(
            "register", platform=self.platform, client_name="bridge", client_version="1"
        )
        self.id = answer["client_id"]

    async def subscribe(self, *channel_ids: str) -> None:
        await self.command("subscribe", channel_ids=channel_ids)

    async def answer(self, request_id: str, *, success: bool = True, **data: Any) -> bool:
        return bool(
            (await self.command("response", request_id=request_id, success=success, data=data))["success"]
        )

    async def post(self, channel_id: str, *segments: dict[str, Any], **fields: Any) -> dict[str, Any]:
        message = {
            "from_id": "u1",
            "from_name": "Uma",
            "channel_id": channel_id,
            "channel_name": "The group",
            "platform_name": self.platform,
            "segments": segments,
            **fields,
        }
        return await self.command("message", channel_id=channel_id, message=message)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        query = {"client_name": "bridge", "platform": self.platform, "access_key": ACCESS_KEY}
        task = asyncio.create_task(self._read({**query, "client_id_query": self.id}))
        try:
            name, data = await self.next()
            assert (name, data["client_id"]) == ("connected", self.id)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def next(self) -> tuple[str, dict[str, Any]]:
        """Return the next event that is not a heartbeat."""
        while True:
            name, data = await asyncio.wait_for(self.events.get(), WAIT_SECONDS)
            if name != "heartbeat":
                return name, data

    async def next_texts(self, count: int) -> list[str]:
        """Confirm so many messages, and return their texts."""
        texts = []
        while len(texts) < count:
            name, data = await self.next()
            assert name == "send_message"
            texts.append(data["data"]["segments"][0]["content"])
            assert await self.answer(data["request_id"], message_id="m", success=True)
        return texts

    async def _read(self, query: dict[str, str]) -> None:
        async with self.http.stream("GET", PATH, params=query, timeout=None) as stream:
            assert stream.status_code == 200
            name = ""
            async for line in stream.aiter_lines():
                if line.startswith("event:"):
                    name = line[6:].strip()
                elif line.startswith("data:"):
                    self.events.put_nowait((name, json.loads(line[5:])))
