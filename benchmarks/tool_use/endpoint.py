"""An OpenAI chat endpoint on loopback whose answers a subclass gives."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Any

__all__ = ["ChatEndpoint", "common_chars", "completion"]


class ChatEndpoint(ABC):
    """Serves on the event loop that starts it; requests of one connection are answered in order."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; returns the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def stop(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    @abstractmethod
    async def answer(self, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and the body of the answer to a request."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                found = re.search(r"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
                status, answer = await self.answer(body)
                data = json.dumps(answer).encode()
                writer.write(
                    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (status, status.phrase.encode(), len(data), data)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side left, or the loop ends
        finally:
            writer.close()


def completion(message: dict[str, Any], *, model: str, usage: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the body of an answer that is not streamed.

    Args:
        message: its `content`, its `tool_calls`, or both.
        usage: tokens by the protocol's names; None leaves them out.
    """
    ended = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": ended}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}
    return answer if usage is None else {**answer, "usage": usage}


def common_chars(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
