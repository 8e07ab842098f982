"""Limits on bodies, enforced before and while they are read: size and time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_config.settings import GatewaySettings
from gateway.problems import problem_response

__all__ = ["OWN_LIMITS", "BodyLimit"]

#: Paths with a limit other than ``body_bytes``. Such a body may be long: what arrives of it extends its time.
OWN_LIMITS: Final[list[tuple[re.Pattern[str], Callable[[GatewaySettings], int]]]] = [
    (re.compile(r"/api/v1/chats/[^/]+/files(/[^/]*)?"), lambda settings: settings.upload_bytes),
    # Pictures and files are in the JSON; a form may have more only by uploading first.
    (re.compile(r"/api/v1/chats/[^/]+/messages"), lambda settings: settings.media_bytes),
    (re.compile(r"/v1/(chat/completions|responses)"), lambda settings: settings.media_bytes),
]


#: Headers of a request with a body.
_OF_BODY: Final = frozenset({b"content-length", b"transfer-encoding"})
#: A long body may take any time if it arrives at this rate.
_LEAST_BYTES_PER_SECOND: Final = 8 << 10
#: How long the rest of a body may take that the route has not read.
_REST_SECONDS: Final = 2.0


class BodyLimit:
    """Refuses bodies that are too large or arrive too slowly."""

    def __init__(self, app: ASGIApp, *, settings: GatewaySettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limits of its path."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send, most=self._most(scope["path"]), settings=self._settings)
        if _declared(scope) > body.most:
            body.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", _too_large(body.most))
        else:
            with suppress(_RefusedError):
                await self._app(scope, body.receive, body.send)
        if body.fault is not None and not body.has_answered:
            # The rest of the body is not read, so the connection cannot be used again.
            problem = problem_response(
                Request(scope),
                body.fault.status,
                body.fault.code,
                body.fault.detail,
                headers={"Connection": "close"},
            )
            await problem(scope, receive, send)

    def _most(self, path: str) -> int:
        for pattern, limit in OWN_LIMITS:
            if pattern.fullmatch(path):
                return limit(self._settings)
        return self._settings.body_bytes


@dataclass(frozen=True)
class _Fault:
    status: HTTPStatus
    code: str
    detail: str


class _RefusedError(Exception):
    """Ends the application's reading; it may answer with an error of its own, which is not sent."""


class _Body:
    """The body of one request."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, most: int, settings: GatewaySettings
    ) -> None:
        self._receive, self._send, self.most = receive, send, most
        self._seconds = settings.body_seconds
        self._is_large = most > settings.body_bytes
        #: Seconds for which the client may still be waited for.
        self._left = self._seconds
        self._size = 0
        self._is_complete = False
        names = {name for name, _ in scope["headers"]}
        # A client that asks before it sends a body has sent nothing yet.
        is_coming = bool(names & _OF_BODY) and b"expect" not in names
        self._rest_bytes = settings.body_bytes if is_coming else 0
        self.fault: _Fault | None = None
        self.has_answered = False

    def refuse(self, status: HTTPStatus, code: str, detail: str) -> None:
        """Let the request end with a problem document."""
        self.fault = _Fault(status, code, detail)

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
        return message

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
            await self._discard_rest()
        await self._send(message)

    async def _discard_rest(self) -> None:
        """Read the rest of a body before the end of the answer, if it is short and on its way.

        Closing a connection with unread bytes resets it, and the client would lose the answer.
        """
        left = self._rest_bytes
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
