"""A relay in front of a real Redis that can stop replying, disconnect or send garbage."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from pathlib import Path

from stream_server import StreamServer

#: Close with a reset (RST) instead of FIN.
RESET = struct.pack("ii", 1, 0)


class RedisRelay:
    """Relays bytes between its clients and a Redis; use it as an async context manager."""

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None, path: Path | None = None) -> None:
        """Relay to a port of the loopback interface.

        Args:
            path: listen on this Unix socket instead of a port.
        """
        #: Port of the Redis to which later clients are connected.
        self.target = port
        self._server = StreamServer(self._serve, tls=tls, path=path)
        self._tls = tls
        self.clients: list[Client] = []
        self._pumps: set[asyncio.Task[None]] = set()
        #: Whether later clients are never answered.
        self.is_mute = False
        #: A client gets no replies from this command on; empty: no command does that.
        self.mute_at = b""

    @property
    def port(self) -> int:
        """Address of the relay."""
        return self._server.port

    @property
    def url(self) -> str:
        """URL of the Redis behind it."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    @property
    def accepted(self) -> int:
        """Number of connections so far."""
        return len(self.clients)

    async def __aenter__(self) -> RedisRelay:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for client in self.clients:
            client.hang_up()

    def mute(self) -> None:
        """Stop replying to the clients that are connected now."""
        for client in self.clients:
            client.is_mute = True

    def hang_up(self) -> None:
        """Close the current connections in order."""
        for client in self.clients:
            client.hang_up()

    def reset(self) -> None:
        """Reset the current connections."""
        for client in self.clients:
            client.reset()

    def say(self, data: bytes) -> None:
        """Send bytes to the clients that are connected now."""
        for client in self.clients:
            client.writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(writer, is_mute=self.is_mute, mute_at=self.mute_at)
        self.clients.append(client)
        try:
            up_reader, client.upstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # Redis is not running at the moment
            client.reset()
            return
        for pump in (client.pump_up(reader), client.pump_down(up_reader)):
            self._pumps.add(asyncio.create_task(pump))


class Client:
    """One connection to the relay and its own to Redis."""

    def __init__(self, writer: asyncio.StreamWriter, *, is_mute: bool, mute_at: bytes) -> None:
        self.writer, self.is_mute, self._mute_at = writer, is_mute, mute_at
        self.upstream: asyncio.StreamWriter | None = None
        #: Cleared: data from Redis is held back until it is set.
        self.passes = asyncio.Event()
        self.passes.set()
        #: Whether it subscribed to a channel.
        self.subscribes = False
        #: Set when the client has disconnected.
        self.is_gone = asyncio.Event()

    def hang_up(self) -> None:
        self.writer.close()
        if self.upstream is not None:
            self.upstream.close()

    def reset(self) -> None:
        if self.writer.is_closing():
            return
        peer = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort()

    async def pump_up(self, reader: asyncio.StreamReader) -> None:
        assert self.upstream is not None
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.subscribes |= b"SUBSCRIBE" in data
                self.is_mute = self.is_mute or (bool(self._mute_at) and self._mute_at in data)
                self.upstream.write(data)
                await self.upstream.drain()
        self.is_gone.set()
        self.upstream.close()

    async def pump_down(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.passes.wait()
                if not self.is_mute:
                    self.writer.write(data)
                    await self.writer.drain()
        if not self.is_mute:
            self.writer.close()
