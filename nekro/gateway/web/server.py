"""Serves the application with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from broker_config.settings import GatewaySettings
from nekro.gateway.problems import PROBLEM_TYPE
from nekro.gateway.web.listener import url_of
from nekro.gateway.web.requests import ANSWER_HEADERS
from nekro.wire.invocation import new_id
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_client.models import Problem

__all__ = ["GatewayServer", "protocol", "serve"]

#: How long a connection is kept between two requests: longer than clients and proxies keep it, so that they
#: close it and no request meets its end.
_KEEP_ALIVE_SECONDS: Final = 75


async def serve(app: FastAPI, listener: socket.socket, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        on_ready: called with the URL when requests are answered.

    Raises:
        NekroError: the services did not start, or the gateway may not listen there without a key.
    """
    async with app.router.lifespan_context(app):
        server = GatewayServer(app, app.state.services.settings.gateway)
        await server.run_on(listener, on_ready=lambda: on_ready(url_of(listener)))


class GatewayServer(uvicorn.Server):
    """Stops in order: streams end first, then running requests, then the services."""

    def __init__(self, app: FastAPI, settings: GatewaySettings) -> None:
        self._app = app
        self._on_ready: Callable[[], None] = lambda: None
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol(settings.body_seconds, connections=settings.connections),
                lifespan="off",
                log_config=None,
                access_log=False,
                # A header must not choose the address that decides about full rights.
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(settings.drain_seconds),
                ws="none",
            )
        )

    async def run_on(self, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
        """Serve on a socket until ``should_exit``."""
        self._on_ready = on_ready
        await self.serve([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report it."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then wait for requests."""
        self._app.state.stopping.set()
        # A request that is cut at the end of the drain time may be sent again, as after a crash.
        self._app.state.services.caller.leave_calls()
        for running in self._app.state.running.values():
            running.end()
        self._app.state.hub.end()
        self._app.state.changes.end()
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled at the end of the drain time; each answers that it was cut
            await asyncio.wait(self.server_state.tasks, timeout=CLOSE_STEP_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal; the base class would raise it again, and end the process by it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait for requests
        self.should_exit = True


def _drop(transport: asyncio.Transport) -> None:
    """Reset a connection; the kernel too forgets what waits for the client."""
    linger = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()


def _end(transport: asyncio.Transport, unsent: int) -> None:
    """Close a connection whose time is over, or drop it if it is closing and its client takes nothing.

    Args:
        unsent: bytes that waited for the client when its time began.
    """
    if not transport.is_closing():
        detail = "no complete request came in time"
        transport.write(_whole(HTTPStatus.REQUEST_TIMEOUT, "headers_too_slow", detail))
        transport.close()
    elif transport.get_write_buffer_size() >= unsent:
        _drop(transport)


def _whole(status: HTTPStatus, code: str, detail: str) -> bytes:
    """Return the answer to what is not a request, and so does not reach the application."""
    problem = Problem(title=status.phrase, status=status, detail=detail, code=code, request_id=new_id())
    body = problem.model_dump_json()
    headers = {
        **ANSWER_HEADERS,
        "connection": "close",
        "content-type": PROBLEM_TYPE,
        "content-length": str(len(body)),
        "x-request-id": str(problem.request_id),
    }
    lines = [f"HTTP/1.1 {status} {status.phrase}", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", body]).encode("ascii")


class _Protocol(H11Protocol):
    """Bounds the time for the headers of a request and for the end of a connection."""

    seconds: float
    most_connections: int
    _limit: asyncio.TimerHandle | None = None
    #: Bytes that waited for the client when the limit began.
    _unsent = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # In ``scope["state"]`` of each request: for an answer that no client takes, and for refusals.
        self.app_state = {**self.app_state, "abort": partial(_drop, transport), "is_full": self._is_full}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            detail = "this is not a valid request of HTTP/1.1"
            self.transport.write(_whole(HTTPStatus.BAD_REQUEST, "http_invalid", detail))
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A connection that is idle has ``_KEEP_ALIVE_SECONDS``, which uvicorn watches.
        is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_idle or self.transport.get_write_buffer_size():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _is_full(self) -> bool:
        """Whether there are too many; uvicorn's own limit answers with plain text."""
        return max(len(self.connections), len(self.tasks) - 1) >= self.most_connections

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE and not self.transport.is_closing():
            self._unwatch()
        elif self._limit is None:
            self._unsent = self.transport.get_write_buffer_size()
            self._limit = self.loop.call_later(self.seconds, self._end)

    def _unwatch(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _end(self) -> None:
        self._limit = None
        _end(self.transport, self._unsent)
        self._watch()


def protocol(seconds: float, *, connections: int) -> type[H11Protocol]:
    """Return uvicorn's protocol with a time limit for the headers of a request and the end of a connection.

    h11 and not httptools: it bounds the size of the headers, and reads them more strictly.

    Args:
        connections: how many there may be; requests of further ones are refused by the application.
    """

    class Protocol(_Protocol):
        pass

    Protocol.seconds, Protocol.most_connections = seconds, connections
    return Protocol
