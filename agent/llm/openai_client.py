"""A client for endpoints that implement the OpenAI chat protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import openai
from loguru import logger
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agent.llm.port import LLMAnswer, LLMRequest
from agent.llm.record import RequestRecord
from agent.llm.retry import BACKOFF_SECONDS, Fault, RetryPolicy, parse_retry_after
from agent.model import Part, PromptMessage, TextPart
from agent.text import cut_middle
from broker_config.settings import LLMSettings
from nekro_agent.errors import LLMError

__all__ = ["OpenAIClient"]

#: Path for plain posts. The package's own method walks through all messages to translate names, which
#: takes longer than the rest of the work for a request.
_PATH: Final = "/chat/completions"
_Chunks = openai.AsyncStream[ChatCompletionChunk]
#: Sent when no key is configured: local endpoints need none, but the package requires one.
_NO_KEY: Final = "none"
#: Most characters of an endpoint's own message in an error.
_FAULT_CHARS: Final = 300


class _TryFailed(Exception):
    """Ends one attempt; caught by the retry loop and never leaves this module."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


@dataclass
class _Gathered:
    """The received part of one answer."""

    model: str
    #: Receives each piece.
    on_piece: Callable[[str], None] = field(default=lambda _piece: None, repr=False)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None

    def add(self, piece: str) -> None:
        """Append a piece of text."""
        if piece:
            self.pieces.append(piece)
            self.on_piece(piece)


class OpenAIClient:
    """A client of an OpenAI-compatible endpoint, with its own retries instead of the package's.

    Three time limits apply to each attempt: connecting, the first token (of a streamed answer),
    the whole answer. A stream that ends without a finish reason was cut off and is requested again
    from the start; so is an answer without text. The last attempt uses the fallback model. A request
    that the endpoint refuses permanently (4xx) is not repeated, except once with the fallback model
    where that may succeed.
    """

    def __init__(self, settings: LLMSettings, *, backoff_seconds: float = BACKOFF_SECONDS) -> None:
        if not settings.base_url or not settings.model:
            raise LLMError("NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL have to be set to ask an endpoint")
        self._settings = settings
        self._base_url = settings.base_url
        self._policy = RetryPolicy(
            tries=settings.tries,
            backoff_seconds=backoff_seconds,
            longest_seconds=settings.timeout_seconds,
        )
        self._record = RequestRecord(settings.record, client="openai")
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._client: openai.AsyncOpenAI | None = None
        self._asks_usage = True

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the model's answer; see ``LLMClient``."""
        models = self._models()
        tries = 0
        while True:
            model = models.pop(0)
            tries += 1
            try:
                return self._answer(await self._try(request, model, tries), tries)
            except _TryFailed as failed:
                fault = failed.fault
            pause = self._policy.pause_seconds(fault, tries)
            if pause is None and fault.is_of_the_model and models and models[-1] != model:
                models, pause = models[-1:], 0.0
            logger.bind(model=model, status=fault.status, tries=tries, pause_seconds=pause).warning(
                "llm.try_failed: {}", fault.what
            )
            if pause is None:
                raise self._error(fault, model, tries)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _models(self) -> list[str]:
        """Return the model of each attempt; a single attempt does not use the fallback model."""
        models = [self._settings.model] * self._settings.tries
        if self._settings.fallback_model and len(models) > 1:
            models[-1] = self._settings.fallback_model
        return models

    async def _try(self, request: LLMRequest, model: str, number: int) -> _Gathered:
        await self._record.add(request, model=model, number=number)
        gathered = _Gathered(model=model)
        if request.on_delta is not None:
            gathered.on_piece = partial(request.on_delta, number)
        with self._faults():
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    ask = self._ask_streaming if self._settings.stream else self._ask_whole
                    await ask(request, gathered)
            except TimeoutError as exc:
                what = f"no complete answer within {self._settings.timeout_seconds:g} s"
                raise _TryFailed(Fault(what=what)) from exc
        if not gathered.finish_reason:
            raise _TryFailed(Fault(what="the answer was cut off before its end"))
        if not "".join(gathered.pieces).strip():
            raise _TryFailed(Fault(what=f"the answer has no text (finish reason {gathered.finish_reason})"))
        return gathered

    async def _ask_whole(self, request: LLMRequest, gathered: _Gathered) -> None:
        body = self._body(request, gathered.model)
        completion: object = await self._connected().post(_PATH, body=body, cast_to=ChatCompletion)
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            # With a wrong base URL the package returns whatever text the server sent.
            raise _TryFailed(Fault(what="the response is not a chat completion", status=200))
        choice = completion.choices[0]
        gathered.add(choice.message.content or "")
        gathered.finish_reason = choice.finish_reason or "stop"
        _note_usage(gathered, completion)

    async def _ask_streaming(self, request: LLMRequest, gathered: _Gathered) -> None:
        seconds = self._settings.first_token_timeout_seconds
        try:
            async with (
                asyncio.timeout(seconds) as waiting,
                aclosing(self._chunks(request, gathered)) as chunks,
            ):
                async for chunk in chunks:
                    if _add_chunk(gathered, chunk):
                        waiting.reschedule(None)
        except TimeoutError as exc:
            raise _TryFailed(Fault(what=f"no token within {seconds:g} s")) from exc

    async def _chunks(
        self, request: LLMRequest, gathered: _Gathered
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        body = self._body(request, gathered.model) | {"stream": True}
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        try:
            stream = await self._stream(body)
        except openai.BadRequestError as exc:
            # Some compatible servers do not support usage in streams: omit it from now on.
            if not self._asks_usage or "stream_options" not in str(exc):
                raise
            self._asks_usage = False
            del body["stream_options"]
            stream = await self._stream(body)
        async with stream:
            async for chunk in stream:
                yield chunk

    async def _stream(self, body: dict[str, Any]) -> openai.AsyncStream[ChatCompletionChunk]:
        return await self._connected().post(
            _PATH, body=body, cast_to=ChatCompletion, stream=True, stream_cls=_Chunks
        )

    def _connected(self) -> openai.AsyncOpenAI:
        if self._client is None:
            settings = self._settings
            # A pause within a stream may be no longer than the time to its first token. A whole
            # answer arrives in one piece, so only the limit of the whole attempt applies.
            silence = settings.first_token_timeout_seconds if settings.stream else settings.timeout_seconds
            self._client = openai.AsyncOpenAI(
                base_url=self._base_url,
                api_key=self._key or _NO_KEY,
                max_retries=0,
                timeout=openai.Timeout(silence, connect=openai.DEFAULT_TIMEOUT.connect),
            )
        return self._client

    def _body(self, request: LLMRequest, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "messages": [_wire(message) for message in request.messages]}
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        if self._settings.max_output_tokens is not None:
            body["max_tokens"] = self._settings.max_output_tokens
        return body

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Translate the package's errors; no other place handles them."""
        try:
            yield
        except openai.APIStatusError as exc:
            wait = parse_retry_after(exc.response.headers.get("retry-after"))
            what = f"status {exc.status_code}: {self._words(exc)}"
            raise _TryFailed(Fault(what=what, status=exc.status_code, retry_after_seconds=wait)) from exc
        except openai.APIConnectionError as exc:
            cause = exc.__cause__ or exc
            raise _TryFailed(
                Fault(what=f"connection failed: {type(cause).__name__}: {self._words(cause)}")
            ) from exc
        except (openai.OpenAIError, json.JSONDecodeError, UnicodeDecodeError) as exc:
            raise _TryFailed(Fault(what=f"unreadable answer: {self._words(exc)}")) from exc

    def _words(self, exc: BaseException) -> str:
        """Return an error's message, shortened, on one line, with the key removed."""
        words = " ".join(str(exc).split())
        if self._key:
            words = words.replace(self._key, "***")
        return cut_middle(words, _FAULT_CHARS).replace("\n", " ")

    def _error(self, fault: Fault, model: str, tries: int) -> LLMError:
        parts = urlsplit(self._base_url)
        endpoint = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        count = "1 try" if tries == 1 else f"{tries} tries"
        return LLMError(
            f"no answer from model {model} at {endpoint} after {count}: {fault.what}{_hint(fault)}"
        )

    def _answer(self, gathered: _Gathered, tries: int) -> LLMAnswer:
        prices = self._settings
        cost = (gathered.prompt_tokens or 0) * prices.input_price_per_million
        cost += (gathered.answer_tokens or 0) * prices.output_price_per_million
        return LLMAnswer(
            text="".join(gathered.pieces),
            model=gathered.model,
            prompt_tokens=gathered.prompt_tokens,
            answer_tokens=gathered.answer_tokens,
            finish_reason=gathered.finish_reason,
            tries=tries,
            cost=cost / 1_000_000,
        )


def _add_chunk(gathered: _Gathered, chunk: ChatCompletionChunk) -> bool:
    """Add one chunk; return whether the model has sent text, reasoning or its end."""
    _note_usage(gathered, chunk)
    if not chunk.choices:
        return False
    choice = chunk.choices[0]
    # Reasoning models stream their thoughts in fields that the protocol does not define.
    thinks = any(value for name, value in (choice.delta.model_extra or {}).items() if "reasoning" in name)
    gathered.add(choice.delta.content or "")
    gathered.finish_reason = choice.finish_reason or gathered.finish_reason
    return bool(choice.delta.content or choice.finish_reason or thinks)


def _note_usage(gathered: _Gathered, source: ChatCompletion | ChatCompletionChunk) -> None:
    gathered.model = source.model or gathered.model
    if source.usage is not None:
        gathered.prompt_tokens = source.usage.prompt_tokens
        gathered.answer_tokens = source.usage.completion_tokens


def _hint(fault: Fault) -> str:
    if fault.retry_after_seconds is not None:
        return f" (it asks to wait {fault.retry_after_seconds:g} s)"
    if fault.status == 401:
        return " (check NEKRO_LLM__API_KEY)"
    if fault.status == 404:
        return " (check NEKRO_LLM__BASE_URL, which ends before /chat/completions, and NEKRO_LLM__MODEL)"
    if fault.status is None and fault.what.startswith("connection failed"):
        return " (check NEKRO_LLM__BASE_URL and the network)"
    return ""


def _wire(message: PromptMessage) -> dict[str, Any]:
    """Return a message in the protocol's form; without images a plain string, which every server accepts."""
    if not message.images:
        return {"role": message.role.value, "content": _sendable(message.text)}
    return {"role": message.role.value, "content": [_wire_part(part) for part in message.parts]}


def _wire_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": _sendable(part.text)}
    image = {"url": _sendable(part.url)} | ({} if part.detail is None else {"detail": part.detail})
    return {"type": "image_url", "image_url": image}


def _sendable(text: str) -> str:
    """Replace lone surrogates, which a model's earlier answer may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
