"""A TCP or Unix server of a test that leaves no connection open."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

__all__ = ["StreamServer"]

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Turns of the loop in which the connection of an accepted socket is made.
_TURNS = 5


class StreamServer:
    """Like ``asyncio.start_server``, but its end closes each connection that it accepted.

    ``asyncio.Server.close`` leaves accepted connections open. A handler that is cancelled before its first
    step closes none either, and the socket is then reported in some later test.
    """

    def __init__(
        self, handler: Handler, *, tls: ssl.SSLContext | None = None, path: Path | None = None
    ) -> None:
        """Serve with a handler on a free port of the loopback interface, or on a Unix socket."""
        self._handler, self._tls, self._path = handler, tls, path
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def port(self) -> int:
        """Port on which it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> StreamServer:
        if self._path is not None:
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        # A connection that is made after `close` fails, and leaves its socket open.
        for _turn in range(_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            # asyncio of CPython 3.11.2 fails to abort an encrypted connection that was closed.
            with contextlib.suppress(AttributeError):
                writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Also one that closes is kept: it stays open until its peer has read the rest.
        self._writers.add(writer)
        task = asyncio.ensure_future(self._handler(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
