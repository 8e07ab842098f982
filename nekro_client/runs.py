"""Runs of code whose output comes while the code runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from itertools import takewhile

import httpx
from pydantic import ValidationError

from nekro_client.connections import AsyncConnection, Connection, connecting
from nekro_client.errors import ClientError, InvalidAnswerError, UnreachableError, api_error
from nekro_client.models import Event, EventType, Problem, Run, RunEventType
from nekro_client.operations import Backoff, Operation, failure_of, parsed_json
from nekro_client.sse import EventParser, EventTooLargeError
from nekro_client.streams import STREAM_TIMEOUT, require_stream

__all__ = ["AsyncRunStream", "RunStream"]


class RunStream(Iterator[str]):
    """The output of a run in pieces, then its report; also a context manager, which stops the run.

    The pieces together are the output of the report. If the code prints faster than pieces are passed on,
    the rest comes as the last piece.
    """

    def __init__(self, connection: Connection, operation: Operation[Run]) -> None:
        """Send the request with the first piece that is asked for."""
        self._output = _RunOutput(operation.path)
        self._pieces = self._read(connection, _streamed(operation))

    def __next__(self) -> str:
        """Wait for the next piece.

        Raises:
            ApiError: the gateway refuses the run, or the run failed without a report.
            UnreachableError: the connection was lost, and the run is stopped.
            InvalidAnswerError: something else than a gateway answered.
        """
        return next(self._pieces)

    def __enter__(self) -> RunStream:
        """Return the stream."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the run if it has not ended."""
        self.close()

    def close(self) -> None:
        """Stop the run if it has not ended; closed twice is not an error."""
        self._pieces.close()

    def result(self) -> Run:
        """Return the report; pieces that were not read yet are dropped.

        Raises:
            The errors of ``__next__``.
            ClientError: the stream was closed before.
        """
        for _ in self:
            pass
        return self._output.report()

    def _read(self, connection: Connection, operation: Operation[Run]) -> Generator[str, None, None]:
        output, backoff = self._output, Backoff(connection.retry_seconds)
        while True:
            try:
                with connecting(operation.path), _open(connection.http, operation) as response:
                    if not response.is_success:
                        response.read()
                    output.begin(response)
                    for chunk in response.iter_bytes():
                        yield from output.take(chunk)
                output.end()
                return
            except ClientError as error:
                delay = output.delay_after(error, backoff)
            time.sleep(delay)


class AsyncRunStream(AsyncIterator[str]):
    """As ``RunStream``, for one event loop."""

    def __init__(self, connection: AsyncConnection, operation: Operation[Run]) -> None:
        """Send the request with the first piece that is asked for."""
        self._output = _RunOutput(operation.path)
        self._pieces = self._read(connection, _streamed(operation))

    async def __anext__(self) -> str:
        """Wait for the next piece; raises as ``RunStream.__next__``."""
        return await anext(self._pieces)

    async def __aenter__(self) -> AsyncRunStream:
        """Return the stream."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the run if it has not ended."""
        await self.close()

    async def close(self) -> None:
        """Stop the run if it has not ended; closed twice is not an error."""
        await self._pieces.aclose()

    async def result(self) -> Run:
        """Return the report; as ``RunStream.result``."""
        async for _ in self:
            pass
        return self._output.report()

    async def _read(
        self, connection: AsyncConnection, operation: Operation[Run]
    ) -> AsyncGenerator[str, None]:
        output, backoff = self._output, Backoff(connection.retry_seconds)
        while True:
            try:
                with connecting(operation.path):
                    async with _open_async(connection.http, operation) as response:
                        if not response.is_success:
                            await response.aread()
                        output.begin(response)
                        async for chunk in response.aiter_bytes():
                            for piece in output.take(chunk):
                                yield piece
                output.end()
                return
            except ClientError as error:
                delay = output.delay_after(error, backoff)
            await asyncio.sleep(delay)


class _RunOutput:
    """Puts the pieces of a run's output together: both streams share it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parser = EventParser()
        self._seen = ""
        #: Whether a piece is missing; what follows it comes from the report.
        self._has_gap = False
        self._has_begun = False
        self._run: Run | None = None

    def begin(self, response: httpx.Response) -> None:
        """Check the head of an answer; the body of an error must have been read."""
        failure = failure_of(response)
        if failure is not None:
            raise failure
        require_stream(response)
        self._has_begun = True

    def take(self, chunk: bytes) -> Iterator[str]:
        """Yield the pieces that a chunk completes."""
        try:
            for sent in self._parser.feed(chunk):
                if sent.type == EventType.OUTPUT_CHUNK:
                    event = parsed_json(sent.data, Event.model_validate_json, Event.model_validate)
                    piece = self._next(event)
                elif sent.type == RunEventType.ENDED:
                    run = parsed_json(sent.data, Run.model_validate_json, Run.model_validate)
                    piece = self._rest(run)
                elif sent.type == RunEventType.PROBLEM:
                    problem = Problem.model_validate_json(sent.data)
                    raise api_error(problem, retry_after_seconds=None)
                else:
                    continue  # of a newer release
                if piece:
                    yield piece
        except (ValidationError, EventTooLargeError) as exc:
            raise InvalidAnswerError(f"{self._path} returned an invalid run report: {exc}") from exc

    def end(self) -> None:
        """Process the end of the answer."""
        if self._run is None:
            raise UnreachableError(f"{self._path}: the stream ended before the run")

    def report(self) -> Run:
        """Return the report of a run that has ended."""
        if self._run is None:
            raise ClientError("the stream was closed before the run had ended")
        return self._run

    def delay_after(self, error: ClientError, backoff: Backoff) -> float:
        """Return the seconds until the request is sent again; raises ``error`` if it is not.

        A run that has begun is stopped with its connection.
        """
        delay = None if self._has_begun else backoff.delay_after(error)
        if delay is None:
            raise error
        return delay

    def _next(self, event: Event) -> str:
        text, offset = str(event.data.get("text", "")), event.data.get("offset")
        self._has_gap |= offset != len(self._seen)
        if self._has_gap:
            return ""
        self._seen += text
        return text

    def _rest(self, run: Run) -> str:
        self._run = run
        # Of very long output the report leaves out the middle.
        pairs = zip(self._seen, run.output, strict=False)
        return run.output[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def _streamed(operation: Operation[Run]) -> Operation[Run]:
    return replace(operation, headers={**operation.headers, "accept": "text/event-stream"})


def _open(http: httpx.Client, operation: Operation[Run]) -> AbstractContextManager[httpx.Response]:
    return http.stream(
        operation.method,
        operation.path,
        headers=operation.headers,
        content=operation.content,
        timeout=STREAM_TIMEOUT,
    )


def _open_async(
    http: httpx.AsyncClient, operation: Operation[Run]
) -> AbstractAsyncContextManager[httpx.Response]:
    return http.stream(
        operation.method,
        operation.path,
        headers=operation.headers,
        content=operation.content,
        timeout=STREAM_TIMEOUT,
    )
