# Generated from async_connections.py by scripts/sync_client.py.
"""Connections to a gateway: requests with repetition, lists of pages, and streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from nekro_client.answer_limits import limited_blocking
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
    "ChangeStream",
    "Connection",
    "RunStream",
    "Stream",
    "run_blocking",
]


T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Connection:
    """A pool of connections to one gateway."""

    def __init__(
        self,
        url: str | None,
        key: str | None,
        *,
        retry_seconds: float,
        transport: httpx.BaseTransport | None,
    ) -> None:
        """Connect on first use; for the arguments see ``Client``."""
        self.retry_seconds = retry_seconds
        base, headers, auth = connection_options(url, key)
        # No proxy of the environment gets the key of this host.
        self.http = httpx.Client(
            base_url=base,
            headers=headers,
            auth=auth,
            verify=tls_of(base, auth),
            transport=transport,
            trust_env=auth is None,
            event_hooks=limited_blocking(None),
        )

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def send(self, operation: Operation[T]) -> T:
        """Send a request until it has an answer, and return the answer.

        Raises:
            ApiError: the gateway answered with an error; its class and ``code`` say which.
            UnreachableError: no answer came.
            InvalidAnswerError: the response is not a valid gateway response.
        """
        backoff = Backoff(self.retry_seconds)
        while True:
            try:
                return operation.parse(self._attempt(operation))
            except ClientError as error:
                delay = backoff.delay_after(error)
                if delay is None:
                    raise
            time.sleep(delay)

    def all(self, first: Operation[Page[T]]) -> list[T]:
        """Return the items of all pages of a list, given the request of the first one."""
        page = self.send(first)
        items = [*page.items]
        while page.next_cursor is not None:
            page = self.send(first.after(page.next_cursor))
            items += page.items
        return items

    def _attempt(self, operation: Operation[Any]) -> httpx.Response:
        content = operation.upload.chunks() if operation.upload is not None else operation.content
        with connecting(operation.path):
            response = self.http.request(
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


def run_blocking(work: Callable[..., T], *args: Any) -> T:
    """Run work that blocks, and wait for its end; an event loop lets a thread run it, to its end."""
    return work(*args)


class Stream(Iterator[M]):
    """What a gateway streams; also a context manager."""

    def __init__(self, http: httpx.Client, cursor: StreamCursor[M]) -> None:
        """Connect when the first is asked for."""
        self._reader = cursor
        self._coming = self._read(http)

    def __next__(self) -> M:
        """Wait for the next one.

        Raises:
            ApiError: the gateway refuses the stream, because the key was revoked for example.
            UnreachableError: it was out of reach for ``give_up_seconds``.
            InvalidAnswerError: something else than a gateway answered.
        """
        return next(self._coming)

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the stream."""
        self.close()

    def close(self) -> None:
        """End the stream; closed twice is not an error."""
        self._coming.close()

    def _read(self, http: httpx.Client) -> Generator[M, None, None]:
        cursor = self._reader
        while not cursor.is_over:
            params, headers = cursor.connect()
            error: ClientError | None = None
            try:
                with http.stream(
                    "GET", cursor.path, params=params, headers=headers, timeout=cursor.timeout()
                ) as response:
                    if not response.is_success:
                        response.read()
                    cursor.accept(response)
                    for chunk in response.iter_bytes():
                        for one in cursor.take(chunk):
                            yield one
                        if cursor.is_late:
                            break
            except httpx.RequestError as exc:
                error = unreachable(cursor.path, exc)
            except ApiError as exc:
                error = exc
            time.sleep(cursor.delay_after(error))


class ChangeStream(Stream[Change]):
    """Hints about changes."""


class RunStream(Iterator[str]):
    """The output of a run in pieces, then its report; also a context manager, which stops the run.

    The pieces together are the output of the report. If the code prints faster than pieces are passed on,
    the rest comes as the last piece.
    """

    def __init__(self, connection: Connection, operation: Operation[Run]) -> None:
        """Send the request with the first piece that is asked for."""
        self._output = RunOutput(operation.path)
        self._pieces = self._read(connection, streamed(operation))

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
                with connecting(operation.path):
                    with _open(connection.http, operation) as response:
                        if not response.is_success:
                            response.read()
                        output.begin(response)
                        for chunk in response.iter_bytes():
                            for piece in output.take(chunk):
                                yield piece
                output.end()
                return
            except ClientError as error:
                delay = output.delay_after(error, backoff)
            time.sleep(delay)


def _open(http: httpx.Client, operation: Operation[Run]) -> AbstractContextManager[httpx.Response]:
    return http.stream(
        operation.method,
        operation.path,
        headers=operation.headers,
        content=operation.content,
        timeout=STREAM_TIMEOUT,
    )
