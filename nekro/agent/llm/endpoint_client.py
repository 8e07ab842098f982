"""A client for endpoints of every protocol that ``nekro.agent.llm.protocols`` has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property, partial
from typing import Final
from urllib.parse import urlsplit

import httpx
from loguru import logger

from broker_config.model_groups import DEFAULT_GROUP
from broker_config.settings import LLMSettings
from nekro.agent.llm.attempt import BACKOFF_SECONDS, Fault, Gathered, RetryPolicy, TryFailed, joined
from nekro.agent.llm.port import LLMAnswer, LLMRequest, ModelSpent, cost_of, was_withheld
from nekro.agent.llm.protocols import PROTOCOLS, Options
from nekro.agent.llm.reading import fault_of_response, fault_of_transport, hint_of, read_answer
from nekro.agent.llm.telemetry import Endpoint, Inference, RequestRecord, inference
from nekro.agent.room import estimate_tokens, tokens_of_prompt
from nekro.agent.text import cut_middle
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import LLMError, LLMFilterError, LLMTimeoutError
from nekro_client.answer_limits import limited

__all__ = ["EndpointClient"]

#: How long a connection to an endpoint may take.
_CONNECT_SECONDS: Final = 5.0
#: Most characters of an endpoint's own message in an error, and most bytes of a refusal that are read.
_FAULT_CHARS: Final = 300
_FAULT_BYTES: Final = 1 << 20
#: How long the usage may follow the end of a streamed answer.
_USAGE_SECONDS: Final = 1.0
#: How long an unused connection is kept: longer than most programs run between two requests of a turn, and
#: shorter than routers remember it.
_KEEP_ALIVE_SECONDS: Final = 60.0
#: Most bytes between an answer and the end of its response that are read to use the connection again.
_REST_BYTES: Final = 64 << 10


class EndpointClient:
    """A client of one endpoint; its protocol says what is sent and how the answer is read.

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
        self._protocol = PROTOCOLS[settings.protocol]
        parameters = json.loads(settings.parameters or "{}")
        temperature = parameters.get("temperature")
        if not isinstance(temperature, int | float):
            temperature = None
        else:
            del parameters["temperature"]  # each protocol limits it, or leaves it out if it is refused
        self._options = Options(
            model=settings.model,
            stream=settings.stream,
            temperature=temperature,
            max_tokens=settings.max_output_tokens,
            parameters=parameters,
        )
        self._base_url = settings.base_url
        self._policy = RetryPolicy(
            tries=settings.tries,
            backoff_seconds=backoff_seconds,
            longest_seconds=settings.timeout_seconds,
        )
        self._record = RequestRecord(settings.record, client=self._protocol.name, group=group)
        self._endpoint = Endpoint.of(
            settings.base_url,
            protocol=self._protocol.provider,
            stream=settings.stream,
            temperature=temperature,
            max_tokens=settings.max_output_tokens,
        )
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._client: httpx.AsyncClient | None = None
        self._quirks: set[str] = set()

    @property
    def quirks(self) -> tuple[str, ...]:
        """Parameters that the endpoint has refused and that are sent no more, or under another name."""
        return tuple(sorted(self._quirks))

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Return the model's answer; see ``LLMClient``."""
        model, tries = self._settings.model, 0
        while True:
            tries += 1
            try:
                gathered, spent = await self._try(request, model, tries)
                return _answer(gathered, spent, tries)
            except TryFailed as failed:
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
            await client.aclose()

    async def _try(self, request: LLMRequest, model: str, number: int) -> tuple[Gathered, ModelSpent]:
        await self._record.add(request, model=model, number=number)
        gathered = Gathered(model=model, words=self._words)
        if request.on_delta is not None:
            gathered.on_piece = partial(request.on_delta, number)
        is_refused = False
        with inference(
            request, self._endpoint, model=model, group=self._group, number=number, error_of=_error_type
        ) as running:
            try:
                await self._asked(request, gathered, running)
            except TryFailed as failed:
                is_refused = failed.fault.is_refusal and not gathered.pieces
                raise
            finally:
                spent = self._spent(request, gathered, model, is_refused=is_refused)
                _note(gathered, spent, running)
                if request.on_spent is not None:
                    request.on_spent(spent)
        return gathered, spent

    async def _asked(self, request: LLMRequest, gathered: Gathered, running: Inference) -> None:
        with self._faults():
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    await self._read(request, gathered, running)
            except TimeoutError as exc:
                what = f"no complete answer within {self._settings.timeout_seconds:g} s"
                raise TryFailed(Fault(what=what, error=LLMTimeoutError)) from exc
        if not gathered.finish_reason:
            raise TryFailed(Fault(what="the answer was cut off before its end"))
        if was_withheld(gathered.finish_reason):
            what = "the content filter withheld the answer or the rest of it"
            raise TryFailed(Fault(what=what, error=LLMFilterError))

    async def _read(self, request: LLMRequest, gathered: Gathered, running: Inference) -> None:
        first, idle = self._settings.first_token_timeout_seconds, self._settings.idle_timeout_seconds
        clock = asyncio.get_running_loop().time
        has_begun = False
        streams = self._settings.stream

        def on_sign() -> None:
            nonlocal has_begun
            has_begun = True
            # Some servers leave the stream open after the answer: only its usage is still waited for.
            waiting.reschedule(clock() + (min(idle, _USAGE_SECONDS) if gathered.finish_reason else idle))

        try:
            async with asyncio.timeout(first if streams else None) as waiting:
                async with self._response(request) as response:
                    if streams and running.first_chunk_seconds is None:
                        running.has_begun()
                    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
                    chunks = response.aiter_bytes()
                    await read_answer(chunks, gathered, self._protocol, kind=kind, on_sign=on_sign)
                    await _read_rest(chunks)
        except TimeoutError as exc:
            if gathered.finish_reason:
                return
            what = f"no further token within {idle:g} s" if has_begun else f"no token within {first:g} s"
            raise TryFailed(Fault(what=what, error=LLMTimeoutError)) from exc

    @asynccontextmanager
    async def _response(self, request: LLMRequest) -> AsyncIterator[httpx.Response]:
        """Post a request, again without each parameter that the endpoint refuses; those are remembered."""
        while True:
            body = self._protocol.body(request.messages, self._options, self._quirks)
            async with self._connected().stream("POST", self._url, json=body) as response:
                if response.status_code == httpx.codes.OK:
                    yield response
                    return
                refusal = await _start_of(response)
            status = response.status_code
            fault = fault_of_response(status, refusal, response.headers.get("retry-after"), self._words)
            quirk = self._protocol.quirk_of(refusal, body) if 400 <= status < 500 else None
            if quirk is None or quirk in self._quirks:
                raise TryFailed(fault)
            self._quirks.add(quirk)

    @cached_property
    def _url(self) -> httpx.URL:
        return httpx.URL(self._protocol.url(self._base_url, self._options))

    @cached_property
    def _own(self) -> frozenset[tuple[str, str, int | None]]:
        """Scheme, host and port of where the key may be sent."""
        own = httpx.URL(self._base_url)
        return frozenset({(own.scheme, own.host, own.port), ("https", own.host, None)})

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            settings = self._settings
            # The limits of an attempt apply; that of the connection only has to be no shorter than they are.
            self._client = httpx.AsyncClient(
                headers={"user-agent": "nekro-workers"},
                timeout=httpx.Timeout(settings.timeout_seconds, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
                follow_redirects=True,
                proxy=settings.proxy,
                event_hooks=limited(None),  # `read_answer` limits the others
            )
            self._client.event_hooks["request"].append(self._authorise)
        return self._client

    async def _authorise(self, request: httpx.Request) -> None:
        """Add the key, also where a redirect leads to on the same host; never for another one."""
        url = request.url
        is_own = (url.scheme, url.host, url.port) in self._own
        for name, value in self._protocol.headers(self._key).items():
            if is_own:
                request.headers.setdefault(name, value)
            else:
                request.headers.pop(name, None)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Translate the errors of connections; no other place handles them."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise TryFailed(fault_of_transport(exc, self._words)) from exc

    def _words(self, text: str) -> str:
        """Return an endpoint's text shortened, on one line, with the key removed."""
        words = " ".join(text.split())
        if self._key:
            words = words.replace(self._key, "***")
        return cut_middle(words, _FAULT_CHARS).replace("\n", " ")

    def _error(self, fault: Fault, model: str, tries: int) -> LLMError:
        parts = urlsplit(self._base_url)
        endpoint = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        count = "1 try" if tries == 1 else f"{tries} tries"
        error = fault.error(
            f"no answer from model {model} at {endpoint} after {count}: "
            f"{fault.what}{hint_of(fault, self._group, path=self._protocol.path)}"
        )
        error.tries = tries
        return error

    def _spent(self, request: LLMRequest, gathered: Gathered, model: str, *, is_refused: bool) -> ModelSpent:
        if is_refused:
            return ModelSpent(group=self._group, model=model, prompt_tokens=0, answer_tokens=0, cost=0.0)
        prompt, answer = gathered.prompt_tokens, gathered.answer_tokens
        # No prompt has no tokens, and no answer with text has none.
        text = joined([*gathered.pieces, *gathered.refusal])
        is_estimated = not prompt or answer is None or (not answer and bool(text))
        prompt = prompt or tokens_of_prompt(request.messages)
        answer = answer or estimate_tokens(text)
        return ModelSpent(
            group=self._group,
            model=model,
            prompt_tokens=prompt,
            answer_tokens=answer,
            cost=self._cost(prompt, answer, gathered.cached_tokens),
            is_estimated=is_estimated,
        )

    def _cost(self, prompt_tokens: int, answer_tokens: int, cached_tokens: int) -> float:
        prices = self._settings
        return cost_of(
            prompt_tokens,
            answer_tokens,
            cached_tokens,
            input_price=prices.input_price_per_million,
            output_price=prices.output_price_per_million,
            cached_input_price=prices.cached_input_price_per_million,
        )


def _note(gathered: Gathered, spent: ModelSpent, running: Inference) -> None:
    """Fill the span; its tokens are only those that the endpoint reports."""
    running.model, running.response_id = gathered.model, gathered.response_id
    running.finish_reason = gathered.finish_reason
    running.prompt_tokens, running.answer_tokens = gathered.prompt_tokens, gathered.answer_tokens
    running.cost = spent.cost
    running.text = lambda: joined(gathered.pieces or gathered.refusal)


def _answer(gathered: Gathered, spent: ModelSpent, tries: int) -> LLMAnswer:
    text = joined(gathered.pieces)
    is_refusal = bool(gathered.refusal) and not text.strip()
    return LLMAnswer(
        text=joined(gathered.refusal) if is_refusal else text,
        model=gathered.model,
        prompt_tokens=spent.prompt_tokens,
        answer_tokens=spent.answer_tokens,
        finish_reason=gathered.finish_reason,
        tries=tries,
        cost=spent.cost,
        is_estimated=spent.is_estimated,
        is_refusal=is_refusal,
        tool_calls=tuple(gathered.tools),
    )


def _error_type(exc: BaseException) -> str:
    return exc.fault.error.__name__ if isinstance(exc, TryFailed) else type(exc).__name__


async def _read_rest(chunks: AsyncIterator[bytes]) -> None:
    """Read from an answer to the end of its response, without which the connection would be closed.

    Not for long, as some servers leave the stream open; its faults do not concern the answer.
    """
    size = 0
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(POLL_SECONDS):
            async for chunk in chunks:
                size += len(chunk)
                if size > _REST_BYTES:
                    return


async def _start_of(response: httpx.Response) -> bytes:
    """Return the first bytes of a refusal."""
    found = b""
    async for chunk in response.aiter_bytes():
        found += chunk
        if len(found) > _FAULT_BYTES:
            break
    return found[:_FAULT_BYTES]
