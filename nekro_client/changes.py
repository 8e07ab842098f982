"""The stream of changes, for both clients: what to read again, instead of asking at intervals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator

import httpx

from nekro_client.errors import ApiError, ClientError
from nekro_client.models import Change
from nekro_client.operations import API, unreachable
from nekro_client.streams import StreamCursor

__all__ = ["AsyncChangeStream", "ChangeCursor", "ChangeStream"]


class ChangeCursor(StreamCursor):
    """Position of a reader of changes."""

    def __init__(self, *, give_up_seconds: float | None) -> None:
        """Begin with what changes from now on."""
        super().__init__(f"{API}/changes", give_up_seconds=give_up_seconds)

    def take(self, chunk: bytes) -> Iterator[Change]:
        """Yield the hints that a chunk completes.

        Raises:
            InvalidAnswerError: the stream has something else than hints.
        """
        for sent in self._sent(chunk):
            change = self._parsed(Change, sent)
            self._connected()
            yield change


class ChangeStream(Iterator[Change]):
    """Hints about changes; also a context manager."""

    def __init__(self, http: httpx.Client, cursor: ChangeCursor) -> None:
        """Connect at the first hint."""
        self._cursor = cursor
        self._changes = self._read(http)

    def __next__(self) -> Change:
        """Wait for the next hint.

        Raises:
            ApiError: the gateway refuses the stream, because the key was revoked for example.
            UnreachableError: it was out of reach for ``give_up_seconds``.
            InvalidAnswerError: something else than a gateway answered.
        """
        return next(self._changes)

    def __enter__(self) -> ChangeStream:
        """Return the stream."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the stream."""
        self.close()

    def close(self) -> None:
        """End the stream; closed twice is no error."""
        self._changes.close()

    def _read(self, http: httpx.Client) -> Generator[Change, None, None]:
        cursor = self._cursor
        while True:
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
                        yield from cursor.take(chunk)
            except httpx.RequestError as exc:
                error = unreachable(cursor.path, exc)
            except ApiError as exc:
                error = exc
            time.sleep(cursor.delay_after(error))


class AsyncChangeStream(AsyncIterator[Change]):
    """Hints about changes; also a context manager."""

    def __init__(self, http: httpx.AsyncClient, cursor: ChangeCursor) -> None:
        """Connect at the first hint."""
        self._cursor = cursor
        self._changes = self._read(http)

    async def __anext__(self) -> Change:
        """Wait for the next hint.

        Raises:
            ApiError: the gateway refuses the stream, because the key was revoked for example.
            UnreachableError: it was out of reach for ``give_up_seconds``.
            InvalidAnswerError: something else than a gateway answered.
        """
        return await anext(self._changes)

    async def __aenter__(self) -> AsyncChangeStream:
        """Return the stream."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End the stream."""
        await self.close()

    async def close(self) -> None:
        """End the stream; closed twice is no error."""
        await self._changes.aclose()

    async def _read(self, http: httpx.AsyncClient) -> AsyncGenerator[Change, None]:
        cursor = self._cursor
        while True:
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
                        for change in cursor.take(chunk):
                            yield change
            except httpx.RequestError as exc:
                error = unreachable(cursor.path, exc)
            except ApiError as exc:
                error = exc
            await asyncio.sleep(cursor.delay_after(error))
