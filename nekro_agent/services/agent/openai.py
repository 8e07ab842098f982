"""Requests to a language model from plugins, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from nekro_agent import runtime
from nekro_agent.errors import InvalidValueError, LLMError
from nekro_agent.ports import ModelRequest
from nekro_agent.services.agent.creator import OpenAIChatMessage

__all__ = ["OpenAIResponse", "gen_openai_chat_response", "gen_openai_embeddings", "token_count"]


#: Characters per token, and tokens of a picture, in estimates.
_TOKEN_CHARS: Final = 3
_PICTURE_TOKENS: Final = 1_000
#: A larger number of tokens is no number that an endpoint has counted.
_MOST_TOKENS: Final = 1 << 30


class OpenAIResponse(BaseModel):
    """A model's answer and its token counts."""

    response_content: str
    thought_chain: str = ""
    use_model: str = ""
    messages: list[dict[str, Any]] = []
    message_cnt: int = 0
    token_consumption: int = 0
    token_input: int = 0
    token_output: int = 0
    generation_time_ms: int = 0
    stream_mode: bool = False


async def gen_openai_chat_response(
    model: str,
    messages: Iterable[OpenAIChatMessage | Mapping[str, Any]],
    temperature: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    top_p: float | None = None,
    stop_words: list[str] | None = None,
    max_tokens: int | None = None,
    extra_body: Mapping[str, Any] | str | None = None,
    top_k: int | None = None,
    api_key: str | None = None,
    base_url: str | None = None,
    proxy_url: str | None = None,
    stream_mode: bool = False,
    max_wait_time: float | None = None,
    **unused: object,
) -> OpenAIResponse:
    """Send messages to a model and return its complete answer.

    Endpoint, key and model usually come from a group of ``core.config.MODEL_GROUPS``.

    Args:
        extra_body: further values of the request; a text is JSON.
        proxy_url: HTTP proxy; None and "" mean none.
        stream_mode: accepted for compatibility; the answer is returned complete either way.
        max_wait_time: seconds; None leaves it to the client.
        unused: options of the reference that have no counterpart (callbacks for parts, log files).

    Raises:
        LLMError: the endpoint refused or did not answer.
        BudgetExceededError: a budget is used up; it is an ``LLMError`` too.
        InvalidValueError: ``extra_body`` is not a JSON object.
    """
    plain = [m.to_dict() if isinstance(m, OpenAIChatMessage) else dict(m) for m in messages]
    body = _extra_body(extra_body) | ({} if top_k is None else {"top_k": top_k})
    options = {
        "temperature": temperature,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "top_p": top_p,
        "stop": stop_words,
        "max_tokens": max_tokens,
        "extra_body": body or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    started = time.monotonic()
    asked = ModelRequest(
        model=model, base_url=base_url, prompt_tokens=_tokens_of(plain), answer_tokens=max_tokens
    )
    async with _charged(asked) as used, _asked(model, api_key, base_url, proxy_url, max_wait_time) as client:
        with _readable(model):
            answer = await client.chat.completions.create(model=model, messages=plain, **given)
            message = answer.choices[0].message
            text = message.content or ""
            if not isinstance(text, str):
                raise TypeError("the text is none")
        usage = answer.usage
        prompt, completion = token_count(usage, "prompt_tokens"), token_count(usage, "completion_tokens")
        if completion is None or (text and not completion):
            used.answer_tokens, used.is_estimated = _tokens_of(text), True
        else:
            used.answer_tokens = completion
        used.add_prompt(prompt, expected=asked.prompt_tokens)
        used.cached_tokens = _cached_tokens(usage)
    return OpenAIResponse(
        response_content=text,
        thought_chain=str(getattr(message, "reasoning_content", None) or ""),
        use_model=str(answer.model),
        messages=plain,
        message_cnt=len(plain),
        token_consumption=token_count(usage, "total_tokens") or 0,
        token_input=prompt or 0,
        token_output=completion or 0,
        generation_time_ms=round((time.monotonic() - started) * 1000),
    )


async def gen_openai_embeddings(
    model: str,
    input: str | list[str],
    api_key: str | None = None,
    base_url: str | None = None,
    dimensions: int | None = None,
    proxy_url: str | None = None,
    endpoint: str = "/embeddings",
    timeout: float | None = None,  # noqa: ASYNC109  # the reference's name
    **unused: object,
) -> list[float]:
    """Return the embedding of a text (of the first one of a list).

    Args:
        proxy_url: HTTP proxy; None and "" mean none.
        endpoint: only the endpoint's standard path is supported.
        timeout: seconds; None leaves it to the client.

    Raises:
        LLMError: the endpoint refused or did not answer.
        BudgetExceededError: a budget is used up; it is an ``LLMError`` too.
        InvalidValueError: ``endpoint`` is another path.
    """
    if endpoint.strip("/") != "embeddings":
        raise InvalidValueError(f"gen_openai_embeddings: endpoint {endpoint!r} is not supported")
    given = {"dimensions": dimensions} if dimensions is not None else {}
    asked = ModelRequest(model=model, base_url=base_url, prompt_tokens=_tokens_of(input), answer_tokens=0)
    async with _charged(asked) as used, _asked(model, api_key, base_url, proxy_url, timeout) as client:
        with _readable(model):
            answer = await client.embeddings.create(model=model, input=input, **given)
            embedding = list(answer.data[0].embedding)
        prompt = token_count(answer.usage, "prompt_tokens")
        used.add_prompt(prompt, expected=asked.prompt_tokens)
    return embedding


def _extra_body(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    try:
        parsed = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
        if isinstance(parsed, Mapping):
            return dict(parsed)
        raise ValueError(f"it is a {type(parsed).__name__}")
    except ValueError as exc:
        raise InvalidValueError(f"extra_body must be a JSON object: {exc}") from exc


@dataclass(kw_only=True)
class _Used:
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    is_estimated: bool = False

    def add_prompt(self, reported: int | None, *, expected: int) -> None:
        """Count the tokens of the prompt; one that was answered has some."""
        self.prompt_tokens = reported or expected
        self.is_estimated |= not reported


@contextlib.asynccontextmanager
async def _charged(request: ModelRequest) -> AsyncIterator[_Used]:
    """Count a request on the budgets; after a cancellation or a crash the estimate counts as used."""
    budget = runtime.current().model_budget if runtime.is_bound() else None
    charge = None if budget is None else await budget.reserve(request)
    used = _Used()
    try:
        yield used
    except LLMError:
        if charge is not None:
            await charge.settle(prompt_tokens=0, answer_tokens=0)
        raise
    if charge is not None:
        await charge.settle(
            prompt_tokens=used.prompt_tokens,
            answer_tokens=used.answer_tokens,
            cached_tokens=used.cached_tokens,
            is_estimated=used.is_estimated,
        )


def _cached_tokens(usage: Any) -> int:
    """Return the tokens of the prompt that the endpoint had in its cache; 0 if it does not say."""
    return token_count(getattr(usage, "prompt_tokens_details", None), "cached_tokens") or 0


def token_count(usage: object, field_name: str) -> int | None:
    """Return a number of tokens that an endpoint has counted; None if it says none.

    Nothing checks what servers send.

    Args:
        usage: an object of the package, or the JSON of an endpoint.
    """
    count = usage.get(field_name) if isinstance(usage, dict) else getattr(usage, field_name, None)
    return count if type(count) is int and 0 <= count <= _MOST_TOKENS else None


@contextlib.contextmanager
def _readable(model: str) -> Iterator[None]:
    """Translate what the package and its user raise for an answer of another form."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError):
        raise LLMError(f"model {model}: the response is not an answer of a model") from None


def _tokens_of(value: object) -> int:
    """Estimate the tokens of messages, texts and their parts; a picture counts as a fixed number."""
    if isinstance(value, str):
        return len(value) // _TOKEN_CHARS + 1
    if isinstance(value, Mapping):
        if "image_url" in value:
            return _PICTURE_TOKENS
        return sum(_tokens_of(value.get(name)) for name in ("content", "text"))
    return sum(map(_tokens_of, value)) if isinstance(value, list | tuple) else 0


@cache
def _authorities() -> ssl.SSLContext:
    """Return what verifies servers; reading it takes 20 ms, and each request would do it on the loop."""
    import httpx  # here as in `_asked`

    return httpx.create_ssl_context()


@contextlib.asynccontextmanager
async def _asked(
    model: str,
    api_key: str | None,
    base_url: str | None,
    proxy_url: str | None,
    timeout_seconds: float | None,
) -> AsyncIterator[Any]:
    """Yield a client; its errors become ``LLMError`` without the key, which endpoints may repeat."""
    # Imported here because the package takes a second to import and most plugins do not use a model.
    from openai import NOT_GIVEN, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

    from nekro_client.answer_limits import AnswerTooLargeError, EncodedAnswerError, limited

    key = (api_key or "").strip()
    try:
        async with AsyncOpenAI(
            api_key=key or "none",
            base_url=base_url,
            timeout=timeout_seconds or NOT_GIVEN,
            max_retries=1,
            http_client=DefaultAsyncHttpxClient(
                verify=_authorities(), proxy=proxy_url or None, event_hooks=limited()
            ),
        ) as client:
            yield client
    except OpenAIError as exc:
        # The client hides behind "Connection error." what was wrong with an answer.
        cause = exc.__cause__ if isinstance(exc.__cause__, AnswerTooLargeError | EncodedAnswerError) else exc
        text = str(cause).replace(key, "***") if key else str(cause)
        # Not chained: the original error contains the endpoint's text with the key.
        raise LLMError(f"model {model} at {base_url or 'the default endpoint'}: {text}") from None
