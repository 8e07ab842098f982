"""Gemini's generateContent and streamGenerateContent.

Source: https://ai.google.dev/api/generate-content and https://ai.google.dev/gemini-api/docs/troubleshooting
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

from nekro.agent.llm.attempt import Fault, Gathered, TryFailed, dict_of, list_of, name_in, unreadable
from nekro.agent.llm.protocols.base import (
    SYSTEM,
    TEMPERATURE,
    Options,
    encoded_image,
    refused,
    sendable,
    turns,
)
from nekro.agent.model import Part, PromptMessage, PromptRole, TextPart
from nekro_agent.errors import LLMFilterError
from nekro_agent.services.agent.openai import token_count

__all__ = ["GeminiProtocol"]

_VERSION: Final = "/v1beta"
_HAS_VERSION: Final = re.compile(r"/v\d+[a-z0-9]*(?:/|$)")
_CONFIG: Final = "generationConfig"
#: Names of parameters that other protocols use for the same; they belong to ``generationConfig``.
_RENAMED: Final = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "max_tokens": "maxOutputTokens",
    "max_completion_tokens": "maxOutputTokens",
    "stop": "stopSequences",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}


class GeminiProtocol:
    """See ``ChatProtocol``."""

    name = "gemini"
    provider = "gcp.gemini"
    path = f"{_VERSION}/models"

    def url(self, base_url: str, options: Options) -> str:
        """See ``ChatProtocol``."""
        model = options.model if "/" in options.model else f"models/{options.model}"
        method = "streamGenerateContent" if options.stream else "generateContent"
        return _below(base_url, f"/{quote(model)}:{method}", "alt=sse" if options.stream else "")

    def models_url(self, base_url: str) -> str:
        """See ``ChatProtocol``."""
        return _below(base_url, "/models")

    def headers(self, key: str) -> dict[str, str]:
        """See ``ChatProtocol``."""
        return {"x-goog-api-key": key} if key else {}

    def body(
        self, messages: Iterable[PromptMessage], options: Options, quirks: Collection[str]
    ) -> dict[str, Any]:
        """See ``ChatProtocol``."""
        system, found = turns(messages, keep_system=SYSTEM not in quirks)
        limits = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        given |= options.parameters
        config: dict[str, Any] = {_RENAMED[name]: value for name, value in given.items() if name in _RENAMED}
        if isinstance(config.get("stopSequences"), str):
            config["stopSequences"] = [config["stopSequences"]]
        config |= dict_of(given.pop(_CONFIG, None))
        if TEMPERATURE in quirks:
            config.pop("temperature", None)
        body: dict[str, Any] = {
            "contents": [
                {
                    "role": "model" if turn.role is PromptRole.ASSISTANT else "user",
                    "parts": [_wire_part(part) for part in turn.parts],
                }
                for turn in found
            ]
        }
        if system:
            body["systemInstruction"] = {"parts": [{"text": system}]}
        if config:
            body[_CONFIG] = config
        return body | {name: value for name, value in given.items() if name not in _RENAMED}

    def quirk_of(self, refusal: bytes, body: Mapping[str, Any]) -> str | None:
        """See ``ChatProtocol``."""
        return refused(refusal, has_temperature="temperature" in dict_of(body.get(_CONFIG)))

    def read_event(self, event: dict[str, Any], gathered: Gathered) -> bool:
        """See ``ChatProtocol``.

        Raises:
            TryFailed: the filter withheld the prompt.
        """
        gathered.note_names(event, model="modelVersion", response_id="responseId")
        has_usage = _note_usage(event, gathered)
        candidates = list_of(event.get("candidates"))
        blocked = name_in(dict_of(event.get("promptFeedback")), "blockReason")
        if blocked and not candidates:
            what = f"the content filter withheld the prompt ({blocked})"
            raise TryFailed(Fault(what=what, error=LLMFilterError))
        candidate = dict_of(candidates[0] if candidates else None)
        parts = list_of(dict_of(candidate.get("content")).get("parts"))
        has_part = any([_add_part(part, gathered) for part in parts])
        finish_reason = name_in(candidate, "finishReason")
        gathered.finish_reason = finish_reason or gathered.finish_reason
        gathered.is_over = has_usage and bool(finish_reason)
        return bool(has_part or finish_reason)

    def read_whole(self, body: object, gathered: Gathered) -> None:
        """See ``ChatProtocol``; a stream without ``alt=sse`` is a list of its events."""
        events = [event for event in (body if isinstance(body, list) else [body]) if isinstance(event, dict)]
        if not any("candidates" in event or "promptFeedback" in event for event in events):
            raise unreadable("the response is not an answer of Gemini's protocol")
        for event in events:
            self.read_event(event, gathered)
        gathered.finish_reason = gathered.finish_reason or "stop"


def _below(base_url: str, path: str, query: str = "") -> str:
    """Return an address below the base URL, which may name a version or not."""
    parts = urlsplit(base_url)
    base = parts.path.rstrip("/")
    base = base if _HAS_VERSION.search(base) else f"{base}{_VERSION}"
    query = "&".join(part for part in (parts.query, query) if part)
    return parts._replace(path=f"{base}{path}", query=query).geturl()


def _wire_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"text": sendable(part.text)}
    encoded = encoded_image(part.url)
    if encoded is None:
        media_type = mimetypes.guess_type(urlsplit(part.url).path)[0] or "image/jpeg"
        return {"fileData": {"mimeType": media_type, "fileUri": sendable(part.url)}}
    media_type, data = encoded
    return {"inlineData": {"mimeType": media_type, "data": data}}


def _add_part(part: object, gathered: Gathered) -> bool:
    """Add a part; return whether it has text, reasoning or a call."""
    found = dict_of(part)
    text = found.get("text")
    if isinstance(text, str) and not found.get("thought"):
        gathered.add(text)
        return bool(text)
    call = found.get("functionCall")
    if call is not None:
        gathered.add_tool(dict_of(call).get("name"))
    return bool(found)


def _note_usage(event: dict[str, Any], gathered: Gathered) -> bool:
    usage = event.get("usageMetadata")
    if not isinstance(usage, dict):
        return False
    prompt = [token_count(usage, name) for name in ("promptTokenCount", "toolUsePromptTokenCount")]
    answer = [token_count(usage, name) for name in ("candidatesTokenCount", "thoughtsTokenCount")]
    gathered.prompt_tokens = _sum(prompt)
    gathered.answer_tokens = _sum(answer)
    gathered.cached_tokens = token_count(usage, "cachedContentTokenCount") or 0
    return True


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
