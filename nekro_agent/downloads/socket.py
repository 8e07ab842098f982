"""The connection of a download, to admitted addresses: few large reads, while the kernel collects the data.

The reader pauses after each read that returned less than a block. ``SO_RCVLOWAT`` would save the pauses, but
with it the kernel stops growing the receive window: at a round trip of 50 ms a connection then has a quarter
of its rate.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import httpcore

from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.errors import DownloadError, DownloadRefusedError

__all__ = ["BLOCK_BYTES", "CheckedBackend", "GatheringStream"]

T = TypeVar("T")

#: Size of one read. Each read has the same cost in Python, whatever its size.
BLOCK_BYTES: Final = 1 << 20
#: How long data are collected before they are read; fewer, larger reads. With twice of it, the receive window
#: does not always grow.
_GATHER_SECONDS: Final = 0.005
_RECORD_BYTES: Final = 16 << 10


class GatheringStream(httpcore.AsyncNetworkStream):
    """A TCP connection, with or without TLS, whose reader is not woken for each packet."""

    def __init__(self, connection: socket.socket) -> None:
        """``connection`` is connected and non-blocking."""
        self._socket = connection
        self._gathers = False
        #: Whether the last read returned all that had been received.
        self._is_drained = False

    @classmethod
    async def connect(
        cls,
        address: str,
        port: int,
        *,
        timeout_seconds: float | None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> GatheringStream:
        """Connect to an IP address.

        Raises:
            httpcore.ConnectError: nothing listens there, or it cannot be reached.
            httpcore.ConnectTimeout: it did not answer.
        """
        with _translated(httpcore.ConnectError, httpcore.ConnectTimeout):
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option in socket_options or ():
                    connection.setsockopt(*option)
                if local_address is not None:
                    connection.bind((local_address, 0))
                async with asyncio.timeout(timeout_seconds):
                    await asyncio.get_running_loop().sock_connect(connection, (address, port))
            except BaseException:
                connection.close()
                raise
        return cls(connection)

    def gather(self, *, is_body: bool) -> None:
        """Let later reads collect data up to a block, as a body needs, or return what is there at once."""
        self._gathers, self._is_drained = is_body, False

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
    ) -> bytes:
        """Return received data, ``b""`` at the end; after ``gather`` up to a block, more than ``max_bytes``.

        The parser of httpcore accepts any size, but requests 64 KiB at a time.
        """
        with _translated(httpcore.ReadError, httpcore.ReadTimeout):
            while True:
                if self._is_drained:
                    await asyncio.sleep(_GATHER_SECONDS)
                size = BLOCK_BYTES if self._gathers else max_bytes
                data = self._take(size)
                self._is_drained = self._gathers and data is not None and len(data) < size
                if data is not None:
                    return data
                if not await self._ready(timeout):
                    raise TimeoutError(f"no data for {timeout} s")

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
    ) -> None:
        """Send the whole buffer."""
        view = memoryview(buffer)
        with _translated(httpcore.WriteError, httpcore.WriteTimeout):
            while view:
                sent = await self._done(lambda rest=view: self._socket.send(rest), timeout)  # type: ignore[misc]
                view = view[sent:]

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
    ) -> GatheringStream:
        """Start TLS, verifying the server's name."""
        try:
            with _translated(httpcore.ConnectError, httpcore.ConnectTimeout):
                encrypted = self._socket = ssl_context.wrap_socket(
                    self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
                )
                await self._done(encrypted.do_handshake, timeout)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Close the connection."""
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Return the values that httpcore uses."""
        if info == "ssl_object":
            return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if info == "is_readable":
            return self._socket.fileno() < 0 or self._holds_something()
        return None

    def _holds_something(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _take(self, size: int) -> bytes | None:
        """Return what the socket has received; None if nothing, ``b""`` at the end."""
        if not isinstance(self._socket, ssl.SSLSocket):
            try:
                return self._socket.recv(size)
            except BlockingIOError:
                return None
        # One read returns one record of at most 16 KiB.
        records: list[bytes] = []
        for _ in range(max(1, size // _RECORD_BYTES)):
            try:
                records.append(self._socket.recv(_RECORD_BYTES))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError:
                if not records:
                    raise
                break  # return what was read before; the next read raises the error again
            if not records[-1]:
                break
        return b"".join(records) if records else None

    async def _done(self, act: Callable[[], T], seconds: float | None) -> T:
        """Return the result of ``act``, retried whenever it would block."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                to_write = False
            except (BlockingIOError, ssl.SSLWantWriteError):
                to_write = True
            left = None if end is None else max(0.0, end - time.monotonic())
            if not await self._ready(left, to_write=to_write):
                raise TimeoutError(f"the connection made no progress for {seconds} s")

    async def _ready(self, seconds: float | None, *, to_write: bool = False) -> bool:
        """Wait until the socket is readable or writable; False if that takes longer."""
        loop = asyncio.get_running_loop()
        is_ready: asyncio.Future[bool] = loop.create_future()

        def settle(value: bool) -> None:
            if not is_ready.done():
                is_ready.set_result(value)

        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise OSError("the connection was closed")
        timer = None if seconds is None else loop.call_later(seconds, settle, False)
        (loop.add_writer if to_write else loop.add_reader)(descriptor, settle, True)
        try:
            return await is_ready
        finally:
            (loop.remove_writer if to_write else loop.remove_reader)(descriptor)
            if timer is not None:
                timer.cancel()


@contextmanager
def _translated(error: type[Exception], timeout: type[Exception]) -> Iterator[None]:
    """Convert errors of sockets and of TLS to httpcore's."""
    try:
        yield
    except TimeoutError as exc:
        raise timeout(str(exc)) from exc
    except OSError as exc:
        raise error(str(exc)) from exc


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections only to admitted addresses.

    The name is resolved here and the connection uses the checked address, so a name that changes
    its answer between check and use (DNS rebinding) has no effect.
    """

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first admitted address that answers."""
        failure: Exception | None = None
        for address in await self._policy.resolve(host, port):
            try:
                return await GatheringStream.connect(
                    address,
                    port,
                    timeout_seconds=timeout,
                    local_address=local_address,
                    socket_options=socket_options,
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        raise DownloadError(f"host {host!r} does not accept connections: {failure}") from failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Refuse, because a URL must not lead to a local socket."""
        raise DownloadRefusedError(f"Unix socket {path!r} is not a valid download source")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)
