"""A scripted model behind an OpenAI chat endpoint that counts what it reads and writes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["CountingModel", "Usage"]


@dataclass(kw_only=True)
class Usage:
    """What the requests of one task cost; characters of JSON texts."""

    requests: int = 0
    prompt_chars: int = 0
    #: Characters that do not repeat the beginning of the task's previous request, as a prompt cache counts.
    new_chars: int = 0
    answer_chars: int = 0


class CountingModel:
    """Gives the prepared answers, one per request, after a delay."""

    def __init__(self, *, seconds_per_request: float) -> None:
        """Create it.

        Args:
            seconds_per_request: how long it takes for each answer; 0 answers at once.
        """
        self._seconds = seconds_per_request
        self._answers: list[dict[str, Any]] = []
        self._previous = ""
        self._server: asyncio.Server | None = None
        self.usage = Usage()

    async def start(self) -> str:
        """Listen; returns the base URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    def stop(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    def prepare(self, *answers: dict[str, Any]) -> Usage:
        """Begin a task: count from zero, and give these messages as answers; returns the count."""
        self._answers = list(answers)
        self._previous = ""
        self.usage = Usage()
        return self.usage

    def answer_next(self, answer: dict[str, Any] | str) -> None:
        """Give one more message, or a text, as an answer."""
        self._answers.append({"content": answer} if isinstance(answer, str) else answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                found = re.search(r"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(found[1]) if found else 0))
                await asyncio.sleep(self._seconds)
                writer.write(self._answer(body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side left, or the loop ends
        finally:
            writer.close()

    def _answer(self, body: dict[str, Any]) -> bytes:
        # Tools come first, as endpoints put them before the messages.
        read = json.dumps([body.get("tools", []), body["messages"]], ensure_ascii=False)
        message = self._answers.pop(0)
        usage = self.usage
        usage.requests += 1
        usage.prompt_chars += len(read)
        usage.new_chars += len(read) - _common_chars(read, self._previous)
        usage.answer_chars += len(message.get("content") or "") + sum(
            len(call["function"]["name"]) + len(call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        self._previous = read
        ended = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": ended}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "bench", "choices": [choice]}
        data = json.dumps(answer).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
            len(data),
            data,
        )


def _common_chars(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
