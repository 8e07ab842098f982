"""The scripted model: an endpoint that gives a task's answers, if the prompts show what they should."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from benchmarks.evaluation.task import Reply
from benchmarks.tool_use.endpoint import ChatEndpoint, common_chars, completion
from nekro.agent.multimodal import image_data
from nekro.agent.room import ESTIMATE, MOST_TOKENS, tokens_of_image

__all__ = ["MODEL", "Script", "ScriptedModel", "text_of", "tokens_of_answer", "tokens_of_request"]

MODEL: Final = "scripted"
#: Tokens that endpoints add to each message, for its role and its ends.
_PER_MESSAGE: Final = 4
_QUOTED_CHARS: Final = 600


@dataclass(kw_only=True)
class Script:
    """The answers of one way through a task, and what went wrong with it."""

    replies: Sequence[Reply]
    #: The newest text of the person.
    newest: str = ""
    given: int = 0
    groups: dict[str, str] = field(default_factory=dict)
    #: What a prompt did not show, or a request too many.
    faults: list[str] = field(default_factory=list)
    #: Prompt tokens that do not repeat the beginning of the request before, as a prompt cache counts.
    new_tokens: int = 0
    _previous: str = ""
    _pictures: int = 0

    @property
    def left(self) -> int:
        """Answers that were not asked for."""
        return len(self.replies) - self.given

    def next(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the next message of the model; None, and a fault, if the prompt is not as expected."""
        number = self.given + 1
        if number > len(self.replies):
            self._fault(f"request {number}: the script has {len(self.replies)} answers", messages)
            return None
        reply = self.replies[self.given]
        wanted = self._wanted(messages[-1]) if reply.after is None else reply.after
        found = re.search(wanted, text_of(messages[-1]), re.DOTALL | re.MULTILINE)
        if found is None:
            self._fault(f"request {number}: the prompt does not show {wanted!r}", messages)
            return None
        images = sum(len(_images(message)) for message in messages)
        if images < reply.images:
            self._fault(f"request {number}: the prompt has {images} pictures", messages)
            return None
        self.given += 1
        self.groups |= {name: text for name, text in found.groupdict().items() if text is not None}
        text = reply.filled(self.groups)
        if reply.tool is None:
            return {"content": text}
        function = {"name": reply.tool, "arguments": text}
        return {
            "content": None,
            "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
        }

    def count_new(self, body: dict[str, Any]) -> None:
        """Count what a prompt cache would not have of a request."""
        read = _as_read(body)
        self.new_tokens += ESTIMATE.count(read[common_chars(read, self._previous) :])
        pictures = [image for message in body["messages"] for image in _images(message)]
        self.new_tokens += sum(map(_tokens_of_picture, pictures[self._pictures :]))
        self._previous, self._pictures = read, len(pictures)

    def _wanted(self, last: dict[str, Any]) -> str:
        """Return what the last message must have if an answer says nothing about it."""
        return r"\A(?!error: )" if last["role"] == "tool" else re.escape(self.newest)

    def _fault(self, what: str, messages: Sequence[dict[str, Any]]) -> None:
        self.faults.append(f"{what}; its last message: {text_of(messages[-1])[-_QUOTED_CHARS:]!r}")


class ScriptedModel(ChatEndpoint):
    """Gives the answers of one script at a time, with usage by the project's estimate."""

    def __init__(self, *, seconds_per_request: float = 0.0) -> None:
        """Create it; it takes ``seconds_per_request`` for each answer."""
        super().__init__()
        self._seconds = seconds_per_request
        self.script: Script | None = None

    async def answer(self, body: dict[str, Any]) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the script's next answer; 400 if the prompt is not as the script expects."""
        await asyncio.sleep(self._seconds)
        message = None if self.script is None else self.script.next(body["messages"])
        if message is None:
            error = {"message": "the script has no answer to this prompt", "type": "script", "code": None}
            return HTTPStatus.BAD_REQUEST, {"error": error}
        assert self.script is not None
        self.script.count_new(body)
        prompt, answer = tokens_of_request(body), tokens_of_answer(message)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return HTTPStatus.OK, completion(message, model=MODEL, usage=usage)


def text_of(message: dict[str, Any]) -> str:
    """Return all text of a message of the protocol."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _as_read(body: dict[str, Any]) -> str:
    """Return a request without its pictures as one text, tools first, as endpoints put them."""
    parts = [json.dumps(body["tools"], ensure_ascii=False)] if body.get("tools") else []
    for message in body["messages"]:
        parts += [message["role"], text_of(message)]
        parts += [part for each in message.get("tool_calls") or () for part in each["function"].values()]
    return "\n".join(parts)


def tokens_of_request(body: dict[str, Any]) -> int:
    """Estimate the tokens of a request: its messages with pictures and tool calls, and its tools."""
    tools = body.get("tools")
    total = ESTIMATE.count(json.dumps(tools, ensure_ascii=False)) if tools else 0
    for message in body["messages"]:
        total += _PER_MESSAGE + ESTIMATE.count(text_of(message)) + _tokens_of_calls(message)
        total += sum(_tokens_of_picture(part) for part in _images(message))
    return total


def tokens_of_answer(message: dict[str, Any]) -> int:
    """Estimate the tokens of an answer."""
    return ESTIMATE.count(text_of(message)) + _tokens_of_calls(message)


def _tokens_of_calls(message: dict[str, Any]) -> int:
    functions = [each["function"] for each in message.get("tool_calls") or ()]
    return sum(ESTIMATE.count(each["name"]) + ESTIMATE.count(each["arguments"]) for each in functions)


def _images(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part["image_url"] for part in content if part.get("type") == "image_url"]


def _tokens_of_picture(image: dict[str, Any]) -> int:
    decoded = image_data(image["url"])
    if decoded is None or not decoded[1].startswith(b"\x89PNG"):
        return MOST_TOKENS
    width, height = struct.unpack(">II", decoded[1][16:24])
    return tokens_of_image(width, height, image.get("detail"))
