"""The stdio transport: newline-delimited JSON-RPC of a confined process, with bounds on what it sends.

The SDK's own transport reads lines of any length, starts programs without isolation and passes on whatever
arrives. This one bounds the length of a message and the rate of messages, and skips what is not a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from loguru import logger
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCRequest, jsonrpc_message_adapter

from nekro.base.tasks import end_tasks
from nekro.extensions.mcp.client.messages import messages_of
from nekro.extensions.mcp.client.tools import line
from nekro.sandbox.programs import Program
from nekro_agent.durations import DEFER_SECONDS

__all__ = ["LineSplitter", "StdioTransport", "TooLong"]

_CHUNK_BYTES: Final = 64 << 10
#: Messages and bytes that are read at once; then the loop gets time for others.
_BURST_MESSAGES: Final = 64
_BURST_BYTES: Final = 1 << 20
#: How long the exit code may take after the end of a stream.
_EXIT_SECONDS: Final = 0.5
#: Lines that are not messages, since the last message; then the server counts as broken.
_MOST_GARBAGE: Final = 10_000
#: Bytes at the ends of a message that is too long, in which its id is looked for.
_END_BYTES: Final = 512
_ID_AT_START: Final = re.compile(rb'\A\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,15})\s*,')
_ID_AT_END: Final = re.compile(rb'"id"\s*:\s*(\d{1,15})\s*\}\s*\Z')
#: Lines of stderr that errors quote.
_LAST_LINES: Final = 5
_MOST_LINE_CHARS: Final = 500
_MOST_LOGGED_LINES: Final = 200


@dataclass(frozen=True)
class TooLong:
    """A line that exceeded the limit; it was skipped."""

    size: int
    #: Id of the request that it answered; None if that is not visible at its ends.
    request_id: int | None


class LineSplitter:
    """Splits a stream of bytes into lines of a largest length; holds no more than that."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._head = b""
        self._tail = b""
        #: Bytes of the line that is skipped; 0 while none is.
        self._skipped = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | TooLong]:
        """Yield the lines that a chunk completes."""
        *complete, rest = chunk.split(b"\n")
        for part in complete:
            self._add(part)
            yield self._line()
        self._add(rest)

    def _add(self, part: bytes) -> None:
        if not self._skipped and len(self._buffer) + len(part) <= self._limit:
            self._buffer += part
            return
        if not self._skipped:
            self._head = bytes((self._buffer + part)[:_END_BYTES])
            self._skipped = len(self._buffer)
            self._tail = bytes(self._buffer[-_END_BYTES:])
            self._buffer.clear()
        self._skipped += len(part)
        self._tail = (self._tail + part)[-_END_BYTES:]

    def _line(self) -> bytes | TooLong:
        if not self._skipped:
            found = bytes(self._buffer)
            self._buffer.clear()
            return found
        match = _ID_AT_START.search(self._head) or _ID_AT_END.search(self._tail)
        long = TooLong(self._skipped, None if match is None else int(match[1]))
        self._skipped, self._head, self._tail = 0, b"", b""
        return long


class StdioTransport:
    """The streams of one running server; implements the SDK's ``Transport``."""

    def __init__(self, program: Program, *, name: str, most_bytes: int, hide: Callable[[str], str]) -> None:
        """
        Args:
            hide: removes secrets from texts.
        """
        self._program, self._name, self._most_bytes, self._hide = program, name, most_bytes, hide
        #: Set when the server does not send any more.
        self.ended = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._fault: str | None = None
        #: The lines of a message so far that the server writes on several lines.
        self._partial = bytearray()
        #: Requests without an answer, and the highest id of all.
        self._open: set[int | str] = set()
        self._last_id = 0
        #: Whether the server has answered a request under its id.
        self._has_echoed = False
        #: Lines that were written to the log; more of a kind than ``_MOST_LOGGED_LINES`` are not.
        self._logged = {"output": 0, "stderr": 0}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = contextlib.ExitStack()

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]:
        inbox, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        sent, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        for stream in (inbox, received, sent, outbox):
            self._closing.callback(stream.close)
        self._tasks = [
            asyncio.create_task(self._read(inbox), name="mcp-stdout"),
            asyncio.create_task(self._write(outbox), name="mcp-stdin"),
            asyncio.create_task(self._read_errors(), name="mcp-stderr"),
            asyncio.create_task(self._watch(), name="mcp-watch"),
        ]
        return received, sent

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_tasks(*self._tasks)
        self._closing.close()

    def why_it_ended(self) -> str:
        """Return one line: the fault, or the exit code and what it wrote to stderr last."""
        code = self._program.process.returncode
        text = self._fault or ("it closed its output" if code is None else f"it ended with exit code {code}")
        words = " / ".join(self._last_lines)
        return f"{text}; its last words: {words}" if words else text

    async def _read(self, inbox: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        stdout, splitter = self._program.process.stdout, LineSplitter(self._most_bytes)
        assert stdout is not None  # noqa: S101 - started with pipes
        garbage = messages = size = 0
        try:
            while chunk := await stdout.read(_CHUNK_BYTES):
                size += len(chunk)
                for one in splitter.feed(chunk):
                    found = self._messages(one)
                    garbage = 0 if found else garbage + 1
                    if garbage > _MOST_GARBAGE:
                        self._fault = f"it wrote {garbage} lines to its output that are not messages"
                        return
                    for message in found:
                        await inbox.send(message)
                    messages += 1
                    if messages % _BURST_MESSAGES == 0:
                        await asyncio.sleep(DEFER_SECONDS)
                if size >= _BURST_BYTES:
                    size = 0
                    await asyncio.sleep(DEFER_SECONDS)
            # The code and the last words arrive shortly after the end of the output.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await self._program.process.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # the session is closed
        finally:
            self.ended.set()
            inbox.close()

    def _messages(self, one: bytes | TooLong) -> list[SessionMessage]:
        if isinstance(one, TooLong):
            text = f"its answer has {one.size} bytes; the limit is {self._most_bytes}"
            logger.bind(server=self._name, bytes=one.size).warning("mcp_message_too_long")
            if one.request_id is None:
                return []
            self._open.discard(one.request_id)
            error = ErrorData(code=INTERNAL_ERROR, message=text)
            return [SessionMessage(JSONRPCError(jsonrpc="2.0", id=one.request_id, error=error))]
        if not one.strip():
            return []
        one = self._whole(one)
        found = [message for read in messages_of(one) if (message := self._addressed(read)) is not None]
        if not found:
            self._log("output", line(one[:200].decode("utf-8", "replace"), 200))
        return [
            SessionMessage(jsonrpc_message_adapter.validate_python(message, by_name=False))
            for message in found
        ]

    def _whole(self, one: bytes) -> bytes:
        """Return a line; the last one of a message on several lines, ``{`` to ``}``, with those before it."""
        line_ = one.rstrip()
        if not self._partial and line_ != b"{":
            return one
        self._partial += one + b"\n"
        if line_ == b"}":
            one = bytes(self._partial)
        if line_ == b"}" or len(self._partial) > self._most_bytes:
            self._partial.clear()
        return one

    def _addressed(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return a message; an answer gets the id of its request. None if that is unknown.

        Some servers write the same id in every answer, or none in errors. Where they never wrote the right
        one, an id that no request had is that of the only open request.
        """
        if "method" in message:
            return message
        found = message["id"]
        was_sent = isinstance(found, int) and 0 < found <= self._last_id
        self._has_echoed |= found in self._open
        is_error = found is None and "error" in message
        if not was_sent and len(self._open) == 1 and (is_error or not self._has_echoed):
            found = next(iter(self._open))
        self._open.discard(found)
        return None if found is None else {**message, "id": found}

    async def _write(self, outbox: MemoryObjectReceiveStream[SessionMessage]) -> None:
        stdin = self._program.process.stdin
        assert stdin is not None  # noqa: S101 - started with pipes
        try:
            async for message in outbox:
                if isinstance(message.message, JSONRPCRequest) and isinstance(message.message.id, int):
                    self._open.add(message.message.id)
                    self._last_id = max(self._last_id, message.message.id)
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode() + b"\n")
                await stdin.drain()
        except (OSError, RuntimeError):  # it has closed its input; without it no request can be answered
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await self._program.process.wait()
                    return
            self._fault = self._fault or "it closed its input"
            self._program.kill()

    async def _read_errors(self) -> None:
        stderr, splitter = self._program.process.stderr, LineSplitter(_CHUNK_BYTES)
        assert stderr is not None  # noqa: S101 - started with pipes
        while chunk := await stderr.read(_CHUNK_BYTES):
            for one in splitter.feed(chunk):
                if isinstance(one, TooLong) or not one.strip():
                    continue
                text = self._hide(
                    line(one[: 4 * _MOST_LINE_CHARS].decode("utf-8", "replace"), _MOST_LINE_CHARS)
                )
                self._last_lines.append(text)
                self._log("stderr", text)
            await asyncio.sleep(DEFER_SECONDS)

    def _log(self, source: str, text: str) -> None:
        self._logged[source] += 1
        if self._logged[source] <= _MOST_LOGGED_LINES:
            logger.bind(server=self._name, source=source, text=self._hide(text)).debug("mcp_server_wrote")

    async def _watch(self) -> None:
        """Kill a server that uses too much memory, where the kernel does not bound it."""
        while True:
            await asyncio.sleep(1)
            if await asyncio.to_thread(self._program.is_too_large):
                self._fault = f"it used more than {self._program.memory_bytes} bytes of memory"
                self._program.kill()
