"""MCP messages over a command's standard streams: lines of JSON, and nothing else on stdout."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from nekro_agent.errors import UsageError

__all__ = ["HostStreams", "host_streams"]

#: Most bytes of a message of the host.
_MOST_BYTES: Final = 32 << 20
_PARSE_ERROR: Final = -32700


class HostStreams:
    """Messages of the host that started this process, and messages to it; made by ``host_streams``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read and write lines."""
        self._reader, self._writer = reader, writer

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield lines that are JSON until the host closes the stream; others are answered with an error."""
        while (line := await self._line()) is not None:
            fault = _fault(line)
            if fault is None:
                yield line.decode()
            elif line.strip():
                await self.fail(None, _PARSE_ERROR, fault)

    async def write(self, text: str) -> None:
        """Write text, which ``flush`` sends."""
        self._writer.write(text.encode())

    async def flush(self) -> None:
        """Wait until the host takes what was written; a host that has left ends the messages."""
        try:
            await self._writer.drain()
        except ConnectionError:
            self._reader.feed_eof()

    async def fail(self, request_id: object, code: int, text: str) -> None:
        """Write an error as the answer to a request; None: a message that has no readable id."""
        error = {"code": code, "message": text}
        await self.write(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}) + "\n")
        await self.flush()

    async def _line(self) -> bytes | None:
        """Return the next line, cut if it is too long; None at the end."""
        cut = b""
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
                return cut or line
            except asyncio.LimitOverrunError as exc:
                part = await self._reader.readexactly(exc.consumed)
                cut = cut or part
            except asyncio.IncompleteReadError as exc:
                return cut or exc.partial or None


@asynccontextmanager
async def host_streams() -> AsyncIterator[HostStreams]:
    """Open the streams; in the block stdin is empty and stdout is stderr for everything else in the process.

    Raises:
        UsageError: stdin or stdout is a file.
    """
    with _diverted() as (incoming, outgoing):
        try:
            reader, reading = await _reader(incoming)
            writer = await _writer(outgoing)
        except ValueError as exc:
            detail = (
                "stdin and stdout must be pipes: an MCP host starts this command and writes messages to it"
            )
            raise UsageError(detail) from exc
        try:
            yield HostStreams(reader, writer)
        finally:
            reading.close()
            writer.transport.abort()


@contextmanager
def _diverted() -> Iterator[tuple[int, int]]:
    """Yield descriptors of stdin and stdout; child processes inherit the null device and stderr instead."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield incoming, outgoing
    finally:
        os.dup2(incoming, 0)
        os.dup2(outgoing, 1)
        for descriptor in (nothing, incoming, outgoing):
            os.close(descriptor)


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MOST_BYTES)
    # A transport closes its file, and ``_diverted`` needs its descriptors until the end.
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb")
    )
    return reader, transport


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport: Any
    transport, _ = await loop.connect_write_pipe(lambda: protocol, os.fdopen(os.dup(descriptor), "wb"))
    return asyncio.StreamWriter(transport, protocol, None, loop)


def _fault(line: bytes) -> str | None:
    """Return why a line is not a message; None if it is JSON."""
    if len(line) >= _MOST_BYTES:
        return f"a message has at most {_MOST_BYTES} bytes"
    try:
        json.loads(line)
    except (ValueError, RecursionError) as exc:
        return f"a line of stdin is no JSON: {str(exc)[:200]}"
    return None
