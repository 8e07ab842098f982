"""Serves the application with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from broker_config.settings import GatewaySettings
from gateway.web.listener import url_of

__all__ = ["GatewayServer", "protocol", "serve"]

_LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


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
                http=protocol(settings.body_seconds),
                lifespan="off",
                log_config=None,
                access_log=False,
                # A header must not choose the address that decides about full rights.
                proxy_headers=False,
                server_header=False,
                limit_concurrency=settings.connections,
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
        self._app.state.mcp.end()
        self._app.state.hub.end()
        self._app.state.changes.end()
        await super().shutdown(sockets)

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
        transport.write(_LATE)
        transport.close()
    elif transport.get_write_buffer_size() >= unsent:
        _drop(transport)


def protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a time limit for the headers of a request and the end of a connection.

    h11 and not httptools: it bounds the size of the headers, and reads them more strictly.
    """

    class Protocol(H11Protocol):
        _limit: asyncio.TimerHandle | None = None
        #: Bytes that waited for the client when the limit began.
        _unsent = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # In ``scope["state"]`` of each request, for an answer that the client does not take.
            self.app_state = {**self.app_state, "abort": partial(_drop, transport)}
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE and not self.transport.is_closing():
                self._unwatch()
            elif self._limit is None:
                self._unsent = self.transport.get_write_buffer_size()
                self._limit = self.loop.call_later(seconds, self._end)

        def _unwatch(self) -> None:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

        def _end(self) -> None:
            self._limit = None
            _end(self.transport, self._unsent)
            self._watch()

    return Protocol
