"""Connections to a gateway: requests with repetition, lists of pages, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from nekro_client.answer_limits import limited
from nekro_client.errors import ApiError, ClientError
from nekro_client.models import Change, Page, Run
from nekro_client.operations import (
    Backoff,
    Operation,
    connecting,
    connection_options,
    failure_of,
    tls_of,
    unreachable,
)
from nekro_client.pieces import RunOutput, streamed
from nekro_client.streams import STREAM_TIMEOUT, StreamCursor

__all__ = [
    "AsyncChangeStream",
    "AsyncConnection",
    "AsyncRunStream",
    "AsyncStream",
    "run_blocking",
]


T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class AsyncConnection:
    """A pool of connections to one gateway."""

    def __init__(
        self,
        url: str | None,
        key: str | None,
        *,
        retry_seconds: float,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        """Connect on first use; for the arguments see ``AsyncClient``."""
        self.retry_seconds = retry_seconds
        base, headers, auth = connection_options(url, key)
        # No proxy of the environment gets the key of this host.
        self.http = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            auth=auth,
            verify=tls_of(base, auth),
            transport=transport,
            trust_env=auth is None,
            event_hooks=limited(None),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def send(self, operation: Operation[T]) -> T:
        """Send a request until it has an answer, and return the answer.

        Raises:
            ApiError: the gateway answered with an error; its class and ``code`` say which.
            UnreachableError: no answer came.
            InvalidAnswerError: the response is not a valid gateway response.
        """
        backoff = Backoff(self.retry_seconds)
        while True:
            try:
                return operation.parse(await self._attempt(operation))
            except ClientError as error:
                delay = backoff.delay_after(error)
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    async def all(self, first: Operation[Page[T]]) -> list[T]:
        """Return the items of all pages of a list, given the request of the first one."""
        page = await self.send(first)
        items = [*page.items]
        while page.next_cursor is not None:
            page = await self.send(first.after(page.next_cursor))
            items += page.items
        return items

    async def _attempt(self, operation: Operation[Any]) -> httpx.Response:
        content = operation.upload.achunks() if operation.upload is not None else operation.content
        with connecting(operation.path):
            response = await self.http.request(
                operation.method,
                operation.path,
                params=operation.params,
                headers=operation.headers,
                content=content,
                timeout=operation.timeout,
            )
        failure = failure_of(response)
        if failure is not None:
            raise failure
        return response


async def run_blocking(work: Callable[..., T], *args: Any) -> T:
    """Run work that blocks, and wait for its end; an event loop lets a thread run it, to its end."""
    return await asyncio.shield(asyncio.to_thread(work, *args))


class AsyncStream(AsyncIterator[M]):
    """What a gateway streams; also a context manager."""

    def __init__(self, http: httpx.AsyncClient, cursor: StreamCursor[M]) -> None:
        """Connect when the first is asked for."""
        self._reader = cursor
        self._coming = self._read(http)

    async def __anext__(self) -> M:
        """Wait for the next one.

        Raises:
            ApiError: the gateway refuses the stream, because the key was revoked for example.
            UnreachableError: it was out of reach for ``give_up_seconds``.
            InvalidAnswerError: something else than a gateway answered.
        """
        return await anext(self._coming)

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End the stream."""
        await self.close()

    async def close(self) -> None:
        """End the stream; closed twice is not an error."""
        await self._coming.aclose()

    async def _read(self, http: httpx.AsyncClient) -> AsyncGenerator[M, None]:
        cursor = self._reader
        while not cursor.is_over:
            params, headers = cursor.connect()
            error: ClientError | None = None
            try:
                async with http.stream(
                    "GET", cursor.path, params=params, headers=headers, timeout=cursor.timeout()
                ) as response:
                    if not response.is_success:
                        await response.aread()
                    cursor.accept(response)
                    async for chunk in response.aiter_bytes():
                        for one in cursor.take(chunk):
                            yield one
                        if cursor.is_late:
                            break
            except httpx.RequestError as exc:
                error = unreachable(cursor.path, exc)
            except ApiError as exc:
                error = exc
            await asyncio.sleep(cursor.delay_after(error))


class AsyncChangeStream(AsyncStream[Change]):
    """Hints about changes."""


class AsyncRunStream(AsyncIterator[str]):
    """The output of a run in pieces, then its report; also a context manager, which stops the run.

    The pieces together are the output of the report. If the code prints faster than pieces are passed on,
    the rest comes as the last piece.
    """

    def __init__(self, connection: AsyncConnection, operation: Operation[Run]) -> None:
        """Send the request with the first piece that is asked for."""
        self._output = RunOutput(operation.path)
        self._pieces = self._read(connection, streamed(operation))

    async def __anext__(self) -> str:
        """Wait for the next piece.

        Raises:
            ApiError: the gateway refuses the run, or the run failed without a report.
            UnreachableError: the connection was lost, and the run is stopped.
            InvalidAnswerError: something else than a gateway answered.
        """
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
        """Return the report; pieces that were not read yet are dropped.

        Raises:
            The errors of ``__anext__``.
            ClientError: the stream was closed before.
        """
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
                    async with _open(connection.http, operation) as response:
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


def _open(http: httpx.AsyncClient, operation: Operation[Run]) -> AbstractAsyncContextManager[httpx.Response]:
    return http.stream(
        operation.method,
        operation.path,
        headers=operation.headers,
        content=operation.content,
        timeout=STREAM_TIMEOUT,
    )
