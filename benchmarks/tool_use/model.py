"""A scripted model behind an OpenAI chat endpoint that counts what it reads and writes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from benchmarks.tool_use.endpoint import ChatEndpoint, common_chars, completion

__all__ = ["CountingModel", "Usage"]


@dataclass(kw_only=True)
class Usage:
    """What the requests of one task cost; characters of JSON texts."""

    requests: int = 0
    prompt_chars: int = 0
    #: Characters that do not repeat the beginning of the task's previous request, as a prompt cache counts.
    new_chars: int = 0
    answer_chars: int = 0


class CountingModel(ChatEndpoint):
    """Gives the prepared answers, one per request, after a delay."""

    def __init__(self, *, seconds_per_request: float) -> None:
        """Create it.

        Args:
            seconds_per_request: how long it takes for each answer; 0 answers at once.
        """
        super().__init__()
        self._seconds = seconds_per_request
        self._answers: list[dict[str, Any]] = []
        self._previous = ""
        self.usage = Usage()

    def prepare(self, *answers: dict[str, Any]) -> Usage:
        """Begin a task: count from zero, and give these messages as answers; returns the count."""
        self._answers = list(answers)
        self._previous = ""
        self.usage = Usage()
        return self.usage

    def answer_next(self, answer: dict[str, Any] | str) -> None:
        """Give one more message, or a text, as an answer."""
        self._answers.append({"content": answer} if isinstance(answer, str) else answer)

    async def answer(self, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the next prepared answer."""
        await asyncio.sleep(self._seconds)
        # Tools come first, as endpoints put them before the messages.
        read = json.dumps([body.get("tools", []), body["messages"]], ensure_ascii=False)
        message = self._answers.pop(0)
        usage = self.usage
        usage.requests += 1
        usage.prompt_chars += len(read)
        usage.new_chars += len(read) - common_chars(read, self._previous)
        usage.answer_chars += len(message.get("content") or "") + sum(
            len(call["function"]["name"]) + len(call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        self._previous = read
        return HTTPStatus.OK, completion(message, model="bench")
