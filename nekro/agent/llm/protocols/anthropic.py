"""Anthropic's Messages API.

Source: https://docs.anthropic.com/en/api/messages and https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from nekro.agent.llm.attempt import Gathered, dict_of, list_of, name_in, unreadable
from nekro.agent.llm.protocols.base import (
    MAX_TOKENS,
    SYSTEM,
    TEMPERATURE,
    Options,
    encoded_image,
    refused,
    sendable,
    turns,
)
from nekro.agent.model import Part, PromptMessage, PromptRole, TextPart
from nekro_agent.services.agent.openai import token_count

__all__ = ["AnthropicProtocol"]

_VERSION: Final = "2023-06-01"
#: Longest answer in tokens where the settings have no limit, which the protocol demands, and the one for
#: models that refuse it.
_MAX_TOKENS: Final = 8192
_FEWER_TOKENS: Final = 4096
_TOO_MANY_TOKENS: Final = re.compile(
    rb"max_tokens.{0,60}maximum (?:allowed )?(?:number of )?output tokens", re.DOTALL
)
#: Names of parameters that other protocols use for the same.
_RENAMED: Final = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
#: The highest temperature of the protocol.
_HOTTEST: Final = 1.0


class AnthropicProtocol:
    """See ``ChatProtocol``."""

    name = "anthropic"
    provider = "anthropic"
    path = "/v1/messages"

    def url(self, base_url: str, options: Options) -> str:
        """See ``ChatProtocol``."""
        return _below(base_url, "/messages")

    def models_url(self, base_url: str) -> str:
        """See ``ChatProtocol``."""
        return _below(base_url, "/models")

    def headers(self, key: str) -> dict[str, str]:
        """See ``ChatProtocol``."""
        return {"anthropic-version": _VERSION} | ({"x-api-key": key} if key else {})

    def body(
        self, messages: Iterable[PromptMessage], options: Options, quirks: Collection[str]
    ) -> dict[str, Any]:
        """See ``ChatProtocol``."""
        system, found = turns(messages, keep_system=SYSTEM not in quirks)
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": options.max_tokens or _MAX_TOKENS,
            "messages": [
                {"role": turn.role.value, "content": [_wire_part(part, turn.role) for part in turn.parts]}
                for turn in found
            ],
        }
        if system:
            body["system"] = system
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.stream:
            body["stream"] = True
        body |= {_RENAMED.get(name, name): value for name, value in options.parameters.items()}
        if isinstance(body.get("stop_sequences"), str):
            body["stop_sequences"] = [body["stop_sequences"]]
        if TEMPERATURE in quirks:
            body.pop("temperature", None)
        elif isinstance(body.get("temperature"), int | float):
            body["temperature"] = min(body["temperature"], _HOTTEST)
        if MAX_TOKENS in quirks:
            body["max_tokens"] = min(body["max_tokens"], _FEWER_TOKENS)
        return body

    def quirk_of(self, refusal: bytes, body: Mapping[str, Any]) -> str | None:
        """See ``ChatProtocol``."""
        if _TOO_MANY_TOKENS.search(refusal) and body["max_tokens"] > _FEWER_TOKENS:
            return MAX_TOKENS
        return refused(refusal, has_temperature="temperature" in body)

    def read_event(self, event: dict[str, Any], gathered: Gathered) -> bool:
        """See ``ChatProtocol``; an event of an unknown type, and a ping, say nothing."""
        kind = event.get("type")
        if kind == "message_start":
            message = dict_of(event.get("message"))
            gathered.note_names(message)
            _note_usage(message, gathered)
            return any([_add_block(block, gathered) for block in list_of(message.get("content"))])
        if kind == "content_block_start":
            return _add_block(event.get("content_block"), gathered)
        if kind == "content_block_delta":
            return _add_block(event.get("delta"), gathered)
        if kind == "message_delta":
            _note_usage(event, gathered)
            gathered.finish_reason = (
                name_in(dict_of(event.get("delta")), "stop_reason") or gathered.finish_reason
            )
            return bool(gathered.finish_reason)
        if kind == "message_stop":
            gathered.finish_reason = gathered.finish_reason or "end_turn"
            gathered.is_over = True
        elif kind == "message":  # a whole answer as the only event
            self.read_whole(event, gathered)
            gathered.is_over = True
        return gathered.is_over

    def read_whole(self, body: object, gathered: Gathered) -> None:
        """See ``ChatProtocol``."""
        content = body.get("content") if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(content, list | str):
            raise unreadable("the response is not a message of Anthropic's protocol")
        gathered.note_names(body)
        _note_usage(body, gathered)
        if isinstance(content, str):
            gathered.add(content)
        for block in list_of(content):
            _add_block(block, gathered)
        gathered.finish_reason = name_in(body, "stop_reason") or "end_turn"


def _below(base_url: str, path: str) -> str:
    """Return an address below the base URL, which may end with the version or not."""
    parts = urlsplit(base_url)
    base = parts.path.rstrip("/")
    return parts._replace(path=f"{base}{'' if base.endswith('/v1') else '/v1'}{path}").geturl()


def _wire_part(part: Part, role: PromptRole) -> dict[str, Any]:
    if isinstance(part, TextPart):
        text = sendable(part.text)
        # The protocol refuses a prompt whose last message ends with blanks.
        return {"type": "text", "text": text.rstrip() if role is PromptRole.ASSISTANT else text}
    encoded = encoded_image(part.url)
    if encoded is None:
        return {"type": "image", "source": {"type": "url", "url": sendable(part.url)}}
    media_type, data = encoded
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _add_block(block: object, gathered: Gathered) -> bool:
    """Add a block or a part of one; return whether it has text, reasoning or a call."""
    found = dict_of(block)
    kind = name_in(found, "type")
    if kind in ("text", "text_delta"):
        text = found.get("text")
        if text is not None and not isinstance(text, str):
            raise unreadable(f"the answer's text is {type(text).__name__} data")
        gathered.add(text or "")
        return bool(text)
    if kind.endswith("tool_use"):
        gathered.add_tool(found.get("name"))
    return kind != ""


def _note_usage(source: dict[str, Any], gathered: Gathered) -> None:
    """Note the tokens; the ones from the cache and into it are not among ``input_tokens``."""
    usage = dict_of(source.get("usage"))
    counts = {
        name: token_count(usage, name)
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    }
    # The last event repeats them, or has only those of the answer.
    if any(counts.values()):
        gathered.prompt_tokens = sum(count or 0 for count in counts.values())
        gathered.cached_tokens = counts["cache_read_input_tokens"] or 0
    answer = token_count(usage, "output_tokens")
    if answer is not None:
        gathered.answer_tokens = answer
