"""Connections to a gateway: requests with repetition, lists of pages, downloads, methods that send one
request.

Methods and downloads to paths or streams are written once, for both clients."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, BinaryIO, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import httpx

from nekro_client.answer_limits import limited, limited_blocking
from nekro_client.errors import ApiError, ClientError, InvalidAnswerError
from nekro_client.models import Page
from nekro_client.operations import Backoff, Operation, connection_options, failure_of, unreachable

__all__ = [
    "AsyncConnection",
    "Asynchronous",
    "Blocking",
    "Connection",
    "Download",
    "connecting",
    "request",
    "whole_list",
]


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


P = ParamSpec("P")


class Blocking:
    """A part of ``Client``: its requests return their answers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


class Asynchronous:
    """A part of ``AsyncClient``: its requests are coroutines."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection


class request(Generic[P, T]):
    """Makes a method that builds a request one that sends it and returns the answer."""

    def __init__(self, build: Callable[Concatenate[Any, P], Operation[T]]) -> None:
        self._build = build

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Asynchronous, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], Operation[T]]: ...
    def __get__(self, instance: Blocking | Asynchronous | None, owner: type) -> Callable[..., Any]:
        """Return the method of an object; of the class what was decorated, for its documentation."""
        if instance is None:
            return self._build
        return _method(instance, self._build, instance._connection.send, answer="{}")


class whole_list(Generic[T]):
    """Makes a method that builds the request of a list's first page one that returns all its items."""

    def __init__(self, build: Callable[[Any], Operation[Page[T]]]) -> None:
        self._build = build

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[[], list[T]]: ...
    @overload
    def __get__(self, instance: Asynchronous, owner: type) -> Callable[[], Coroutine[Any, Any, list[T]]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[[Any], Operation[Page[T]]]: ...
    def __get__(self, instance: Blocking | Asynchronous | None, owner: type) -> Callable[..., Any]:
        """Return the method of an object; of the class what was decorated, for its documentation."""
        if instance is None:
            return self._build
        return _method(instance, self._build, instance._connection.all, answer="list[{}]")


def _method(
    instance: Blocking | Asynchronous, build: Callable[..., Any], send: Callable[[Any], Any], *, answer: str
) -> Callable[..., Any]:
    """Return the bound method that builds a request and sends it.

    Args:
        answer: the type that it returns, for ``help``; ``{}`` stands for the innermost one of the request's.
    """
    bound = MethodType(build, instance)

    @wraps(bound)
    def wait(*args: Any, **kwargs: Any) -> Any:
        return send(bound(*args, **kwargs))

    @wraps(bound)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await send(bound(*args, **kwargs))

    method: Any = wait if isinstance(instance, Blocking) else coroutine
    signature = inspect.signature(bound)
    kind = signature.return_annotation.removeprefix("Operation[").removesuffix("]")
    if answer != "{}":
        kind = answer.format(kind.removeprefix("Page[").removesuffix("]"))
    method.__signature__ = signature.replace(return_annotation=kind)
    return cast("Callable[..., Any]", method)


class Download:
    """Writes one file into a stream; a cut connection goes on where it ended."""

    def __init__(
        self, target: BinaryIO, *, retry_seconds: float, start: int = 0, end: int | None = None
    ) -> None:
        """Fetch the bytes from ``start`` and before ``end`` (None: to the end) into ``target``."""
        self._target = target
        self._start, self._end = start, end
        self._etag: str | None = None
        self._backoff = Backoff(retry_seconds)
        #: Bytes written so far.
        self.size_bytes = 0

    def headers(self) -> dict[str, str]:
        """Headers of the next request."""
        headers = {"accept-encoding": "identity"}
        first = self._start + self.size_bytes
        if first or self._end is not None:
            headers["range"] = f"bytes={first}-{'' if self._end is None else self._end - 1}"
        if self.size_bytes and self._etag:
            headers["if-range"] = self._etag
        return headers

    def begin(self, response: httpx.Response) -> None:
        """Check the head of an answer whose body has been read if it is an error.

        Raises:
            ApiError: the gateway refused it.
            InvalidAnswerError: the file changed between two parts of its download.
        """
        failure = failure_of(response)
        if failure is not None:
            raise failure
        if "range" in self.headers() and response.status_code != httpx.codes.PARTIAL_CONTENT:
            what = "changed while it was downloaded" if self.size_bytes else "is not served in parts"
            raise InvalidAnswerError(f"the file {what}")
        self._etag = response.headers.get("etag")

    def write(self, chunk: bytes) -> None:
        """Write a part of the content."""
        self._target.write(chunk)
        self.size_bytes += len(chunk)

    def delay_after(self, error: ClientError) -> float:
        """Return the seconds to wait before the next request; raises ``error`` if there is none."""
        delay = self._backoff.delay_after(error)
        cannot_resume = self.size_bytes > 0 and self._etag is None
        if delay is None or (cannot_resume and not isinstance(error, ApiError)):
            raise error
        return delay
