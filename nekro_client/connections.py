"""Connections to a gateway: requests with repetition, and lists of pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from nekro_client.answer_limits import limited, limited_blocking
from nekro_client.errors import ClientError
from nekro_client.models import Page
from nekro_client.operations import Backoff, Operation, connection_options, failure_of, unreachable

__all__ = ["AsyncConnection", "Connection", "connecting"]

T = TypeVar("T")


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
        self.http = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            auth=auth,
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


@contextmanager
def connecting(path: str) -> Iterator[None]:
    """Translate errors of httpx for a request of ``path``."""
    try:
        yield
    except httpx.RequestError as exc:
        raise unreachable(path, exc) from exc
