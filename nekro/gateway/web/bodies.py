"""Bodies of requests: a route knows who asks before it reads one, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_config.settings import GatewaySettings
from nekro.gateway.dependencies import identity_of
from nekro.gateway.problems import problem_response

__all__ = [
    "OWN_LIMITS",
    "BodyLimit",
    "KeyedRoute",
    "require_few_values",
]


#: Bodies up to this length cannot have enough values to matter.
_SHORT_BYTES: Final = 2 << 20
#: Most values of a longer body, which should be long because of its files. A value takes 50 to 100 bytes.
_MOST_VALUES: Final = 1_000_000


class KeyedRoute(APIRoute):
    """A route that refuses a request without a key before it reads the body.

    FastAPI reads and parses a body before it resolves dependencies, so a dependency is too late.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def identified(request: Request) -> Response:
            await identity_of(request)
            response = await handle(_LimitedRequest(request.scope, request.receive))
            response.headers.update(getattr(request.state, "rate_headers", {}))
            return response

        return identified


class _LimitedRequest(Request):
    """A request whose JSON has a limited number of values."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            HTTPException: 413, it has too many values; 400, the parser cannot read it.
            JSONDecodeError: it is no JSON.
        """
        require_few_values(await self.body())
        try:
            return await super().json()
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError as exc:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is not UTF-8") from exc
        except RecursionError as exc:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is nested too deeply") from exc
        except ValueError as exc:  # the only other one: a limit of Python
            raise HTTPException(HTTPStatus.BAD_REQUEST, "a number of the body has too many digits") from exc


def require_few_values(body: bytes) -> None:
    """Return if a JSON text may be parsed: a few bytes of it may take a hundred in memory.

    Raises:
        HTTPException: 413, it has too many values.
    """
    if len(body) > _SHORT_BYTES and sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise HTTPException(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {_MOST_VALUES} values"
        )


_UPLOADS: Final = r"/api/v1/chats/[^/]+/files(/[^/]*)?"
#: Paths with a limit other than ``body_bytes``. Such a body may be long: what arrives of it extends its time.
OWN_LIMITS: Final[tuple[tuple[re.Pattern[str], Callable[[GatewaySettings], int]], ...]] = (
    (re.compile(_UPLOADS), lambda settings: settings.upload_bytes),
    # Pictures and files are in the JSON; a form may have more only by uploading first.
    (re.compile(r"/api/v1/chats/[^/]+/messages"), lambda settings: settings.media_bytes),
)


#: Headers of a request with a body.
_OF_BODY: Final = frozenset({b"content-length", b"transfer-encoding"})
#: A long body may take any time if it arrives at this rate.
_LEAST_BYTES_PER_SECOND: Final = 8 << 10
#: Paths whose bodies are not kept in memory.
_NOT_KEPT: Final = re.compile(_UPLOADS)
#: Bytes of long bodies in memory at the same time, of one key; of all keys together twice as many. Each stays
#: there until its request ends.
_MOST_KEPT_BYTES: Final = 256 << 20
#: How long the rest of a body may take that the route has not read.
_REST_SECONDS: Final = 2.0


class BodyLimit:
    """Refuses bodies that are too large or arrive too slowly."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: GatewaySettings,
        limits: Iterable[tuple[re.Pattern[str], Callable[[GatewaySettings], int]]] = (),
        passed_on: Iterable[str] = (),
    ) -> None:
        """Limit bodies.

        Args:
            limits: those of more paths, as ``OWN_LIMITS``.
            passed_on: prefixes of paths whose bodies are not kept in memory.
        """
        self._app, self._settings = app, settings
        self._limits = (*OWN_LIMITS, *limits)
        self._passed_on = tuple(passed_on)
        self._kept: Counter[str | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limits of its path."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        most = self._most(path)
        is_kept = not path.startswith(self._passed_on) and _NOT_KEPT.fullmatch(path) is None
        body = _Body(
            scope, receive, send, most=most, settings=self._settings, kept=self._kept, is_kept=is_kept
        )
        if _declared(scope) > body.most:
            body.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", _too_large(body.most))
        else:
            try:
                with suppress(_RefusedError):
                    await self._app(scope, body.receive, body.send)
            finally:
                body.release()
        if body.fault is not None and not body.has_answered:
            if body.fault.status is HTTPStatus.SERVICE_UNAVAILABLE:  # the client is to send it again
                await body.discard_rest(most)
            # The rest of the body is not read, so the connection cannot be used again.
            problem = problem_response(
                Request(scope),
                body.fault.status,
                body.fault.code,
                body.fault.detail,
                headers={"Connection": "close", **body.fault.headers},
            )
            await problem(scope, receive, send)

    def _most(self, path: str) -> int:
        for pattern, limit in self._limits:
            if pattern.fullmatch(path):
                return limit(self._settings)
        return self._settings.body_bytes


@dataclass(frozen=True)
class _Fault:
    status: HTTPStatus
    code: str
    detail: str
    headers: Mapping[str, str]


class _RefusedError(Exception):
    """Ends the application's reading; it may answer with an error of its own, which is not sent."""


class _Body:
    """The body of one request."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        most: int,
        settings: GatewaySettings,
        kept: Counter[str | None],
        is_kept: bool,
    ) -> None:
        self._receive, self._send, self.most = receive, send, most
        self._state, self._kept = scope["state"], kept
        #: From this size on the body counts as one that is in memory.
        self._short_bytes = settings.body_bytes if is_kept else most
        #: Its key, and how many of its bytes count.
        self._counted: tuple[str | None, int] = (None, 0)
        self._seconds = settings.body_seconds
        self._is_large = most > settings.body_bytes
        #: Seconds that the client may still take.
        self._left = self._seconds
        self._size = 0
        self._is_complete = False
        names = {name for name, _ in scope["headers"]}
        # A client that asks before it sends a body has sent nothing yet.
        is_coming = bool(names & _OF_BODY) and b"expect" not in names
        self._rest_bytes = settings.body_bytes if is_coming else 0
        self.fault: _Fault | None = None
        self.has_answered = False

    def refuse(
        self, status: HTTPStatus, code: str, detail: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Let the request end with a problem document."""
        self.fault = _Fault(status, code, detail, headers or {})

    def release(self) -> None:
        """Count the body no more."""
        key_id, size = self._counted
        self._kept[key_id] -= size
        if not self._kept[key_id]:
            del self._kept[key_id]

    async def receive(self) -> Message:
        """Receive the next part of the body; after its end, wait for the client's disconnect."""
        if self._is_complete:
            return await self._receive()
        message = await self._next()
        self._size += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._size > self.most:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", _too_large(self.most))
            raise _RefusedError
        if self._size > self._short_bytes:
            self._count()
        return message

    def _count(self) -> None:
        """Count all that has arrived as in memory; its key is known before a body is read."""
        identity = self._state.get("identity")
        key_id = None if identity is None else identity.key_id
        self._kept[key_id] += self._size - self._counted[1]
        self._counted = (key_id, self._size)
        most = max(_MOST_KEPT_BYTES, self.most)
        if self._kept[key_id] > most or self._kept.total() > 2 * most:
            detail = "too many long bodies at the same time; send this one again"
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", detail, headers={"Retry-After": "1"})
            raise _RefusedError

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError as exc:
            detail = f"the body was not complete after {self._seconds:g} s"
            if self._is_large:
                detail = f"the body came at less than {_LEAST_BYTES_PER_SECOND} bytes per second"
            self.refuse(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", detail)
            raise _RefusedError from exc
        self._left -= loop.time() - began
        if self._is_large:
            earned = len(message.get("body", b"")) / _LEAST_BYTES_PER_SECOND
            self._left = min(self._left + earned, self._seconds)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless the body was refused before it began."""
        if self.fault is not None and not self.has_answered:
            return
        self.has_answered = True
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_end and not self._is_complete and self._rest_bytes > 0:
            await self.discard_rest(self._rest_bytes)
        await self._send(message)

    async def discard_rest(self, left: int) -> None:
        """Read up to ``left`` bytes more of a body before the end of the answer, if they are on their way.

        Closing a connection with unread bytes resets it, and the client would lose the answer.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_REST_SECONDS):
                while not self._is_complete and left >= 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._is_complete = not message.get("more_body", False)


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes"
