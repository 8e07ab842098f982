"""What is recorded of model requests: span and figures as OpenTelemetry's conventions describe them, and a
file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from nekro.agent.llm.port import LLMRequest
from nekro.agent.model import ImagePart, Part, PromptMessage, TextPart
from nekro.agent.multimodal import image_data
from nekro.agent.text import hide_check_words
from nekro.base.metrics import metrics
from nekro.broker.tracing import Span, genai, span
from nekro_agent.files.private_files import make_directory

__all__ = [
    "Endpoint",
    "Inference",
    "RequestRecord",
    "inference",
    "message_json",
    "provider_of",
]


#: Providers that the conventions name, by the end of their host's name; others have that of the protocol.
_PROVIDERS: Final = {
    "openai.azure.com": "azure.ai.openai",
    "services.ai.azure.com": "azure.ai.inference",
    "anthropic.com": "anthropic",
    "cohere.com": "cohere",
    "cohere.ai": "cohere",
    "deepseek.com": "deepseek",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "aiplatform.googleapis.com": "gcp.vertex_ai",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "moonshot.ai": "moonshot_ai",
    "moonshot.cn": "moonshot_ai",
    "perplexity.ai": "perplexity",
    "x.ai": "x_ai",
}
#: Longest name of a model or an answer that an endpoint sends.
_NAME_CHARS: Final = 200
_PORTS: Final = {"https": 443, "http": 80}


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go, and how; all of it is from the settings."""

    provider: str
    #: None: no server.
    host: str | None = None
    port: int | None = None
    stream: bool = False
    temperature: float | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, base_url: str, *, protocol: str = "openai", **how: Any) -> Endpoint:
        """Return the endpoint of a base URL; ``protocol`` names the provider of an unknown host."""
        parts = urlsplit(base_url)
        port = parts.port or _PORTS.get(parts.scheme)
        return cls(
            provider=provider_of(parts.hostname or "", protocol), host=parts.hostname, port=port, **how
        )


def provider_of(host: str, protocol: str = "openai") -> str:
    """Return the convention's name for the provider that serves a host, or that of the protocol."""
    found = (name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return next(found, protocol)


@dataclass
class Inference:
    """One running try; its fields are filled as the answer arrives, and recorded when it ends."""

    model: str = ""
    response_id: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cost: float = 0.0
    #: Returns the text of the answer; called only if contents are captured.
    text: Callable[[], str] = str
    first_chunk_seconds: float | None = None
    _begin: float = 0.0

    def has_begun(self) -> None:
        """The first piece of a streamed answer has arrived."""
        self.first_chunk_seconds = time.monotonic() - self._begin


@contextmanager
def inference(
    request: LLMRequest,
    endpoint: Endpoint,
    *,
    model: str,
    group: str,
    number: int,
    error_of: Callable[[BaseException], str] = lambda exc: type(exc).__name__,
) -> Iterator[Inference]:
    """Observe one try of a request.

    Args:
        model: the model that is asked for.
        number: number of the try, from 1.
        error_of: returns the name of an error, for ``error.type``.
    """
    standard: dict[str, Any] = {
        genai.OPERATION: genai.CHAT,
        genai.PROVIDER: endpoint.provider,
        genai.REQUEST_MODEL: model,
        genai.CONVERSATION_ID: request.chat_key or None,
        genai.STREAM: endpoint.stream or None,
        genai.TEMPERATURE: endpoint.temperature,
        genai.MAX_TOKENS: endpoint.max_tokens,
        "server.address": endpoint.host,
        "server.port": endpoint.port,
    }
    ids: dict[str, str | int | float | bool | None] = {
        "round_id": request.round_id,
        "group": group,
        "try": number,
    }
    error = ""
    with span(f"{genai.CHAT} {model}", ids, kind="client", standard=standard) as part:
        running = Inference(model=model, _begin=time.monotonic())
        part.content(genai.INPUT_MESSAGES, lambda: [message_json(item) for item in request.messages])
        try:
            yield running
        except BaseException as exc:
            error = error_of(exc)
            part.fail(error)
            raise
        finally:
            _record(part, running, error)
            _count(running, endpoint, model, error)


def _record(part: Span, running: Inference, error: str) -> None:
    part.put(
        {
            genai.RESPONSE_MODEL: _name(running.model),
            genai.RESPONSE_ID: _name(running.response_id),
            genai.FINISH_REASONS: None if (reason := _name(running.finish_reason)) is None else [reason],
            genai.INPUT_TOKENS: running.prompt_tokens,
            genai.OUTPUT_TOKENS: running.answer_tokens,
            genai.TIME_TO_FIRST_CHUNK: running.first_chunk_seconds,
        }
    )
    part.set_attributes(cost=running.cost or None)
    if not error:
        part.content(genai.OUTPUT_MESSAGES, lambda: [_answer(running)])


def _name(value: object) -> str | None:
    """Return a name that an endpoint has sent, which may be anything, as an attribute can contain it."""
    if not isinstance(value, str) or not value:
        return None
    return value[:_NAME_CHARS].encode("utf-8", "replace").decode()


def _count(running: Inference, endpoint: Endpoint, model: str, error: str) -> None:
    labels = (genai.CHAT, endpoint.provider, model)
    figures = metrics()
    figures.gen_ai_seconds.labels(*labels, error).observe(time.monotonic() - running._begin)
    for kind, tokens in (("input", running.prompt_tokens), ("output", running.answer_tokens)):
        if tokens is not None:
            figures.gen_ai_tokens.labels(*labels, kind).observe(tokens)
    if running.first_chunk_seconds is not None:
        figures.gen_ai_first_chunk_seconds.labels(*labels).observe(running.first_chunk_seconds)


def message_json(message: PromptMessage) -> dict[str, Any]:
    """Return a message for people who look at prompts, without check words and the data of images."""
    return {"role": message.role.value, "parts": [_part(part) for part in message.parts]}


def _answer(running: Inference) -> dict[str, Any]:
    text = {"type": "text", "content": hide_check_words(running.text())}
    return {"role": "assistant", "parts": [text], "finish_reason": running.finish_reason}


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "content": hide_check_words(part.text)}
    return _image(part)


def _image(part: ImagePart) -> dict[str, Any]:
    """Describe an image without its data."""
    decoded = image_data(part.url)
    if decoded is None:
        return {"type": "uri", "modality": "image", "uri": part.url}
    media_type, data = decoded
    digest = hashlib.sha256(data).hexdigest()
    return {"type": "image", "mime_type": media_type, "bytes": len(data), "sha256": digest}


class RequestRecord:
    """Appends one JSON line for each request sent; without a path it does nothing.

    A line holds ``at``, ``client``, ``group``, ``model``, ``try``, ``round_id``, ``chat_key`` and
    ``messages``; images are shortened to type, length in bytes and SHA-256.
    """

    def __init__(self, path: Path | None, *, client: str, group: str = "default") -> None:
        self._path = path
        self._client = client
        self._group = group

    async def add(self, request: LLMRequest, *, model: str, number: int) -> None:
        """Write the line of one request without blocking the event loop."""
        if self._path is not None:
            await asyncio.to_thread(self._append, self._path, request, model, number)

    def _append(self, path: Path, request: LLMRequest, model: str, number: int) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(),
            "client": self._client,
            "group": self._group,
            "model": model,
            "try": number,
            "round_id": request.round_id,
            "chat_key": request.chat_key,
            "messages": [
                {"role": message.role.value, "content": [_shorten(part) for part in message.parts]}
                for message in request.messages
            ],
        }
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        make_directory(path.parent)
        # One write with O_APPEND, so that lines of several worker processes never mix; private to
        # this user, because it contains messages of people.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _shorten(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": _shorten_image(part)}


def _shorten_image(part: ImagePart) -> dict[str, Any]:
    decoded = image_data(part.url)
    if decoded is None:
        return {"url": part.url}
    media_type, data = decoded
    return {"media_type": media_type, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
