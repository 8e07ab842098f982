"""A client for endpoints that implement the OpenAI chat protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import openai
from loguru import logger
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from agent.llm.faults import ENDPOINT_ERRORS, fault_of, hint_of
from agent.llm.inference import Endpoint, Inference, inference
from agent.llm.port import LLMAnswer, LLMRequest, ModelSpent
from agent.llm.prices import cost_of
from agent.llm.record import RequestRecord
from agent.llm.retry import BACKOFF_SECONDS, Fault, RetryPolicy
from agent.model import Part, PromptMessage, TextPart
from agent.text import cut_middle
from agent.tokens.estimate import estimate_tokens
from agent.tokens.limits import tokens_of_prompt
from broker_config.model_groups import DEFAULT_GROUP
from broker_config.settings import LLMSettings
from nekro_agent.errors import LLMError, LLMFilterError, LLMTimeoutError, LLMUnreadableError
from nekro_agent.services.agent.openai import token_count

__all__ = ["OpenAIClient"]

#: Path for plain posts. The package's own method walks through all messages to translate names, which
#: takes longer than the rest of the work for a request.
_PATH: Final = "/chat/completions"
_Chunks = openai.AsyncStream[ChatCompletionChunk]
#: Sent when no key is configured: local endpoints need none, but the package requires one.
_NO_KEY: Final = "none"
#: Content types of web pages, and of servers that do not stream.
_NO_STREAM: Final = frozenset({"text/html", "application/xhtml+xml", "application/json"})
#: Most characters of an endpoint's own message in an error.
_FAULT_CHARS: Final = 300
#: Most characters of an answer: far above what models write, and little memory.
_MOST_CHARS: Final = 4 << 20
_MOST_NAME_CHARS: Final = 200
#: Most tools that an answer is said to call.
_MOST_TOOLS: Final = 100


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
    #: The model's refusal to answer, and names of tools that it calls.
    refusal: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    finish_reason: str = ""
    response_id: str = ""
    prompt_tokens: int | None = None
    #: Those of the prompt that the endpoint had in its cache.
    cached_tokens: int = 0
    answer_tokens: int | None = None
    chars: int = 0

    def add(self, piece: object, *, to: list[str] | None = None) -> None:
        """Append a piece of text, or None, to the answer or to another list."""
        if piece is not None and not isinstance(piece, str):
            raise _unreadable("the answer's text", piece)
        if piece:
            self.chars += len(piece)
            if self.chars > _MOST_CHARS:
                what = f"the answer has more than {_MOST_CHARS} characters"
                raise _TryFailed(Fault(what=what, error=LLMUnreadableError, status=200))
            (self.pieces if to is None else to).append(piece)
            self.on_piece(piece)

    def add_rest(self, message: ChatCompletionMessage | ChoiceDelta) -> bool:
        """Add what a message has besides its text; returns whether there was anything."""
        calls = message.tool_calls if isinstance(message.tool_calls, list) else []
        functions = [getattr(call, "function", None) for call in calls]
        names = [getattr(function, "name", None) for function in (*functions, message.function_call)]
        named = [name[:_MOST_NAME_CHARS] for name in names if isinstance(name, str)]
        self.tools += named[: _MOST_TOOLS - len(self.tools)]
        self.add(message.refusal if isinstance(message.refusal, str) else None, to=self.refusal)
        return bool(message.refusal or message.tool_calls or message.function_call)


class OpenAIClient:
    """A client of an OpenAI-compatible endpoint, with its own retries instead of the package's.

    Four time limits apply to each attempt: connecting, the first token and each pause (of a streamed
    answer), the whole answer. A stream that ends without a finish reason was cut off and is requested again
    from the start. A request that the endpoint refuses permanently (4xx) is not repeated.
    """

    def __init__(
        self,
        settings: LLMSettings,
        *,
        group: str = DEFAULT_GROUP,
        backoff_seconds: float = BACKOFF_SECONDS,
    ) -> None:
        if not settings.base_url or not settings.model:
            raise LLMError("NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL have to be set to ask an endpoint")
        self._settings = settings
        self._group = group
        self._parameters: dict[str, Any] = json.loads(settings.parameters or "{}")
        self._base_url = settings.base_url
        self._policy = RetryPolicy(
            tries=settings.tries,
            backoff_seconds=backoff_seconds,
            longest_seconds=settings.timeout_seconds,
        )
        self._record = RequestRecord(settings.record, client="openai", group=group)
        self._endpoint = Endpoint.of(
            settings.base_url,
            stream=settings.stream,
            temperature=settings.temperature,
            max_tokens=settings.max_output_tokens,
        )
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._client: openai.AsyncOpenAI | None = None
        self._asks_usage = True

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the model's answer; see ``LLMClient``."""
        model, tries = self._settings.model, 0
        while True:
            tries += 1
            try:
                return self._answer(await self._try(request, model, tries), tries)
            except _TryFailed as failed:
                fault = failed.fault
            pause = self._policy.pause_seconds(fault, tries)
            logger.bind(
                model=model, status=fault.status, tries=tries, pause_seconds=pause, error=fault.what
            ).warning("llm_try_failed")
            if pause is None:
                raise self._error(fault, model, tries)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _try(self, request: LLMRequest, model: str, number: int) -> _Gathered:
        await self._record.add(request, model=model, number=number)
        gathered = _Gathered(model=model)
        if request.on_delta is not None:
            gathered.on_piece = partial(request.on_delta, number)
        is_refused = False
        with inference(
            request, self._endpoint, model=model, group=self._group, number=number, error_of=_error_type
        ) as running:
            try:
                return await self._asked(request, gathered, running)
            except _TryFailed as failed:
                is_refused = failed.fault.is_refusal and not gathered.pieces
                raise
            finally:
                self._note(gathered, running)
                if request.on_spent is not None:
                    request.on_spent(self._spent(request, gathered, model, is_refused=is_refused))

    async def _asked(self, request: LLMRequest, gathered: _Gathered, running: Inference) -> _Gathered:
        with self._faults():
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    if self._settings.stream:
                        await self._ask_streaming(request, gathered, running)
                    else:
                        await self._ask_whole(request, gathered)
            except TimeoutError as exc:
                what = f"no complete answer within {self._settings.timeout_seconds:g} s"
                raise _TryFailed(Fault(what=what, error=LLMTimeoutError)) from exc
        if not gathered.finish_reason:
            raise _TryFailed(Fault(what="the answer was cut off before its end"))
        if gathered.finish_reason == "content_filter":
            what = "the content filter withheld the answer or the rest of it"
            raise _TryFailed(Fault(what=what, error=LLMFilterError))
        return gathered

    async def _ask_whole(self, request: LLMRequest, gathered: _Gathered) -> None:
        body = self._body(request, gathered.model)
        completion: object = await self._connected().post(_PATH, body=body, cast_to=ChatCompletion)
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            # With a wrong base URL the package returns whatever text the server sent.
            what = "the response is not a chat completion"
            raise _TryFailed(Fault(what=what, error=LLMUnreadableError, status=200))
        choice = _first(completion.choices)
        message = getattr(choice, "message", None)
        if not isinstance(message, ChatCompletionMessage):
            raise _unreadable("the answer's message", message)
        gathered.add(message.content)
        gathered.add_rest(message)
        gathered.finish_reason = _name(choice, "finish_reason") or "stop"
        _note_usage(gathered, completion)

    async def _ask_streaming(self, request: LLMRequest, gathered: _Gathered, running: Inference) -> None:
        first, idle = self._settings.first_token_timeout_seconds, self._settings.idle_timeout_seconds
        clock = asyncio.get_running_loop().time
        has_begun = False
        try:
            async with (
                asyncio.timeout(first) as waiting,
                aclosing(self._chunks(request, gathered)) as chunks,
            ):
                async for chunk in chunks:
                    if running.first_chunk_seconds is None:
                        running.has_begun()
                    has_begun = _add_chunk(gathered, chunk) or has_begun
                    if has_begun:
                        waiting.reschedule(clock() + idle)
        except TimeoutError as exc:
            what = f"no further token within {idle:g} s" if has_begun else f"no token within {first:g} s"
            raise _TryFailed(Fault(what=what, error=LLMTimeoutError)) from exc

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
            kind = stream.response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind in _NO_STREAM:
                # The package would find no event in it, as in an answer that was cut off.
                what = f"the response is {kind}, not a stream of a chat completion"
                raise _TryFailed(Fault(what=what, error=LLMUnreadableError, status=200))
            async for chunk in stream:
                yield chunk

    async def _stream(self, body: dict[str, Any]) -> openai.AsyncStream[ChatCompletionChunk]:
        return await self._connected().post(
            _PATH, body=body, cast_to=ChatCompletion, stream=True, stream_cls=_Chunks
        )

    def _connected(self) -> openai.AsyncOpenAI:
        if self._client is None:
            settings = self._settings
            # The limits of an attempt apply; that of the connection only has to be no shorter than they are.
            silence = settings.timeout_seconds
            self._client = openai.AsyncOpenAI(
                base_url=self._base_url,
                api_key=self._key or _NO_KEY,
                max_retries=0,
                timeout=openai.Timeout(silence, connect=openai.DEFAULT_TIMEOUT.connect),
                http_client=openai.DefaultAsyncHttpxClient(proxy=settings.proxy) if settings.proxy else None,
            )
        return self._client

    def _body(self, request: LLMRequest, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "messages": [_wire(message) for message in request.messages]}
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        if self._settings.max_output_tokens is not None:
            body["max_tokens"] = self._settings.max_output_tokens
        return body | self._parameters

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Translate the package's errors; no other place handles them."""
        try:
            yield
        except ENDPOINT_ERRORS as exc:
            raise _TryFailed(fault_of(exc, self._words)) from exc

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
        error = fault.error(
            f"no answer from model {model} at {endpoint} after {count}: "
            f"{fault.what}{hint_of(fault, self._group)}"
        )
        error.tries = tries
        return error

    def _spent(self, request: LLMRequest, gathered: _Gathered, model: str, *, is_refused: bool) -> ModelSpent:
        prompt, answer = gathered.prompt_tokens, gathered.answer_tokens
        if is_refused:
            prompt, answer = 0, 0
        if prompt is None:
            prompt = tokens_of_prompt(request.messages)
        if answer is None:
            answer = estimate_tokens(_joined([*gathered.pieces, *gathered.refusal]))
        return ModelSpent(
            group=self._group,
            model=model,
            prompt_tokens=prompt,
            answer_tokens=answer,
            cost=self._cost(prompt, answer, 0 if is_refused else gathered.cached_tokens),
        )

    def _cost(self, prompt_tokens: int | None, answer_tokens: int | None, cached_tokens: int) -> float:
        prices = self._settings
        return cost_of(
            prompt_tokens or 0,
            answer_tokens or 0,
            cached_tokens,
            input_price=prices.input_price_per_million,
            output_price=prices.output_price_per_million,
            cached_input_price=prices.cached_input_price_per_million,
        )

    def _note(self, gathered: _Gathered, running: Inference) -> None:
        running.model, running.response_id = gathered.model, gathered.response_id
        running.finish_reason = gathered.finish_reason
        running.prompt_tokens, running.answer_tokens = gathered.prompt_tokens, gathered.answer_tokens
        running.cost = self._cost(gathered.prompt_tokens, gathered.answer_tokens, gathered.cached_tokens)
        running.text = lambda: _joined(gathered.pieces or gathered.refusal)

    def _answer(self, gathered: _Gathered, tries: int) -> LLMAnswer:
        text = _joined(gathered.pieces)
        is_refusal = bool(gathered.refusal) and not text.strip()
        return LLMAnswer(
            text=_joined(gathered.refusal) if is_refusal else text,
            model=gathered.model,
            prompt_tokens=gathered.prompt_tokens,
            answer_tokens=gathered.answer_tokens,
            finish_reason=gathered.finish_reason,
            tries=tries,
            cost=self._cost(gathered.prompt_tokens, gathered.answer_tokens, gathered.cached_tokens),
            is_refusal=is_refusal,
            tool_calls=tuple(gathered.tools),
        )


def _error_type(exc: BaseException) -> str:
    return exc.fault.error.__name__ if isinstance(exc, _TryFailed) else type(exc).__name__


def _add_chunk(gathered: _Gathered, chunk: object) -> bool:
    """Add one chunk; return whether the model has sent text, reasoning or its end."""
    if not isinstance(chunk, ChatCompletionChunk):
        raise _unreadable("a part of the answer", chunk)
    _note_usage(gathered, chunk)
    if not chunk.choices:
        return False
    choice = _first(chunk.choices)
    finish_reason = _name(choice, "finish_reason")
    gathered.finish_reason = finish_reason or gathered.finish_reason
    delta = getattr(choice, "delta", None)
    if delta is None:  # some servers leave it out at the end
        return bool(finish_reason)
    if not isinstance(delta, ChoiceDelta):
        raise _unreadable("a part of the answer", delta)
    # Reasoning is streamed in fields that the protocol does not define.
    thinks = any(value for name, value in (delta.model_extra or {}).items() if "reasoning" in name)
    gathered.add(delta.content)
    has_rest = gathered.add_rest(delta)
    return bool(delta.content or finish_reason or thinks or has_rest)


# The package does not check what servers send: each value may have any type.


def _unreadable(what: str, found: object) -> _TryFailed:
    words = f"{what} is {type(found).__name__} data"
    return _TryFailed(Fault(what=words, error=LLMUnreadableError, status=200))


def _first(choices: object) -> object:
    if not isinstance(choices, list):
        raise _unreadable("the list of answers", choices)
    return choices[0]


def _name(source: object, field_name: str) -> str:
    """Return a short text of an endpoint; "" if it is none."""
    value = getattr(source, field_name, None)
    return value[:_MOST_NAME_CHARS] if isinstance(value, str) else ""


def _joined(pieces: Iterable[str]) -> str:
    """Join pieces; some servers cut between the two halves of a character that JSON writes as a pair."""
    joined = "".join(pieces).encode("utf-16-le", "surrogatepass")
    return joined.decode("utf-16-le", "surrogatepass")


def _note_usage(gathered: _Gathered, source: ChatCompletion | ChatCompletionChunk) -> None:
    gathered.model = _name(source, "model") or gathered.model
    gathered.response_id = _name(source, "id") or gathered.response_id
    if source.usage is not None:
        gathered.prompt_tokens = token_count(source.usage, "prompt_tokens")
        details = getattr(source.usage, "prompt_tokens_details", None)
        gathered.cached_tokens = token_count(details, "cached_tokens") or 0
        gathered.answer_tokens = token_count(source.usage, "completion_tokens")


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
