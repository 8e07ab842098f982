"""The socket by which a container reaches its bridge: it cannot inherit a descriptor, so it connects once."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["GuestListener"]

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class GuestListener:
    """A listening socket that accepts one connection, of one user."""

    def __init__(self, path: Path, *, uid: int) -> None:
        self._path = path
        self._uid = uid

    async def open(self) -> None:
        self._connection: asyncio.Future[_Streams] = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        # Only the code's user may enter the directory around it.
        self._path.chmod(0o666)

    async def first_connection(self, ended: asyncio.Future[int]) -> _Streams:
        """Return the first connection.

        Raises:
            SandboxUnavailableError: the container ended first, or did not connect within 30 s.
        """
        waiting: set[asyncio.Future[object]] = {self._connection, ended}  # type: ignore[arg-type]
        await asyncio.wait(waiting, timeout=PROGRAM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._connection.done():
            return self._connection.result()
        reason = "ended" if ended.done() else f"did not connect within {PROGRAM_SECONDS:g} s"
        raise SandboxUnavailableError(f"the container {reason} while it started")

    async def close(self) -> None:
        """Accept no more connections and remove the socket."""
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if self._connection.done() or struct.unpack("3i", credentials)[1] != self._uid:
            writer.close()
            return
        self._connection.set_result((reader, writer))
