"""What a sandbox sends to the host: frames on the socket to its bridge, and the output of the code.

A frame is ``u32 length | u8 type | u32 call id | payload``; the length counts the bytes after it. Each type
has one direction and a largest payload, and the bridge knows the types that are legal in each state: any
other frame ends the run with SECURITY. ``nekro.sandbox.guest.channel`` implements the same format inside,
without importing this module.

Output is hostile text. It is never searched for markers; before it is shown or stored, terminal sequences and
control characters are removed and invalid UTF-8 is replaced.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import re
import struct
import termios
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple, Self

from loguru import logger

from nekro.sandbox.limits.guards import Guard
from nekro_agent.errors import SandboxProtocolError
from nekro_agent.tools.visible_text import without_invisible

__all__ = [
    "HEADER_BYTES",
    "PROTOCOL",
    "Frame",
    "FrameKind",
    "FrameReader",
    "OutputCollector",
    "OutputPipe",
    "clean_text",
    "encode_frame",
]

#: Protocol version, increased when the meaning of a frame changes; HELLO carries it.
PROTOCOL: Final = 2
_HEADER: Final = struct.Struct(">IBI")
HEADER_BYTES: Final = _HEADER.size
#: Bytes after the length field that are not payload: type and call id.
_FIXED_BYTES: Final = 5


class FrameKind(IntEnum):
    """Types of frames; S is the sandbox, B the bridge."""

    #: S to B: ready for code.
    HELLO = 1
    #: B to S: the code, its stubs and limits.
    RUN = 2
    #: S to B: call a method.
    CALL = 3
    #: B to S: the value of a call.
    RETURN = 4
    #: B to S: the error of a call.
    RAISE = 5
    #: B to S: end now.
    STOP = 6
    #: S to B: how the code ended, for display.
    EXIT = 7
    #: S to B: variables that the code leaves for the turn's next program; once, before EXIT.
    KEEP = 8


#: A lookup takes a fifth of the time of ``FrameKind(number)``.
_KINDS: Final[dict[int, FrameKind]] = {kind.value: kind for kind in FrameKind}


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: FrameKind
    call_id: int
    payload: bytes


def encode_frame(kind: FrameKind, payload: bytes = b"", *, call_id: int = 0) -> bytes:
    """Return the bytes of one frame."""
    return _HEADER.pack(len(payload) + _FIXED_BYTES, kind, call_id) + payload


class FrameReader:
    """Reads the frames that a sandbox may send, and refuses others before reading their payload."""

    def __init__(self, reader: asyncio.StreamReader, *, limits: Mapping[FrameKind, int]) -> None:
        """
        Args:
            limits: largest payload in bytes per kind; a kind that is missing is illegal.
        """
        self._reader = reader
        self._limits = limits

    async def read(self) -> Frame | None:
        """Return the next frame, or None when the sandbox closed the socket.

        A socket closed within a frame counts as closed, as the sandbox has ended.

        Raises:
            SandboxProtocolError: the kind is not one that a sandbox may send, or its payload
                is over the limit; nothing of the payload has been read then.
        """
        try:
            length, raw_kind, call_id = _HEADER.unpack(await self._reader.readexactly(HEADER_BYTES))
            kind = self._check(length, raw_kind)
            payload = await self._reader.readexactly(length - _FIXED_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Frame(kind=kind, call_id=call_id, payload=payload)

    def _check(self, length: int, raw_kind: int) -> FrameKind:
        kind = _KINDS.get(raw_kind)
        limit = None if kind is None else self._limits.get(kind)
        if kind is None or limit is None:
            raise SandboxProtocolError(f"the sandbox sent a frame of kind {raw_kind}, which it may not send")
        if not _FIXED_BYTES <= length <= limit + _FIXED_BYTES:
            raise SandboxProtocolError(
                f"the sandbox sent a {kind.name} frame of length {length}; its payload may have {limit} bytes"
            )
        return kind


_CHUNK_BYTES = 64 << 10

#: CSI and OSC sequences, other escapes.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


def clean_text(text: str) -> str:
    """Remove terminal sequences and invisible characters; every kind of line end becomes ``\\n``."""
    text = _TERMINAL.sub("", text)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return without_invisible(text)


class OutputPipe(asyncio.StreamReader):
    """The reading end of a pipe; it knows whether all that was written has been read."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._fd = fd
        self._unread_bytes = 0
        self._pipe: asyncio.ReadTransport | None = None

    @classmethod
    async def open(cls, fd: int) -> Self:
        """Read from a descriptor, which ``close`` closes."""
        loop = asyncio.get_running_loop()
        pipe = cls(fd, loop)
        pipe._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(pipe, loop=loop), os.fdopen(fd, "rb", buffering=0)
        )
        return pipe

    @property
    def is_empty(self) -> bool:
        """Whether all that was written until now has been read."""
        return not self._unread_bytes and (self.at_eof() or not _bytes_in(self._fd))

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # event loops pass bytes only
        """Receive data from the pipe."""
        self._unread_bytes += len(data)
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        """Read as ``StreamReader.read`` does."""
        data = await super().read(n)
        self._unread_bytes -= len(data)
        return data

    def close(self) -> None:
        """Stop reading and close the descriptor."""
        if self._pipe is not None:
            self._pipe.close()


def _bytes_in(fd: int) -> int:
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    return count


class OutputCollector:
    """Counts all output and keeps ``keep_bytes`` of it: the first three quarters and the last quarter."""

    def __init__(
        self, *, keep_bytes: int, kill_bytes: int, on_output: Callable[[str], None] | None = None
    ) -> None:
        self._head_bytes = keep_bytes - keep_bytes // 4
        self._tail_bytes = keep_bytes // 4
        self._kill_bytes = kill_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        #: Bytes printed so far, kept or not.
        self.total_bytes = 0

    @property
    def over_limit(self) -> bool:
        """Whether more was printed than allowed."""
        return self.total_bytes > self._kill_bytes

    @property
    def truncated(self) -> bool:
        """Whether the middle is left out."""
        return self.total_bytes > len(self._head) + len(self._tail)

    async def pump(
        self, reader: asyncio.StreamReader, *, guard: Guard, on_over_limit: Callable[[], None]
    ) -> None:
        """Read to the end; call ``on_over_limit`` once when there is too much, and drop the rest.

        Reading continues after that: a process counts as ended when its pipe is empty.

        Args:
            guard: pending while output is processed.
        """
        while data := await reader.read(_CHUNK_BYTES):
            if self.over_limit:
                continue
            guard.begin()
            self.feed(data)
            if self.over_limit:
                on_over_limit()
            guard.done()

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self.total_bytes += len(data)
        if self._on_output is not None and not self.over_limit:
            self._pass_on(self._on_output, data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        del self._tail[: -self._tail_bytes]

    def _pass_on(self, on_output: Callable[[str], None], data: bytes) -> None:
        text = clean_text(self._decoder.decode(data))
        try:
            if text:
                on_output(text)
        except Exception as exc:
            # A failing callback must not end the run; the output is still kept.
            logger.bind(error=repr(exc)).warning("sandbox_output_watcher_failed")
            self._on_output = None

    def text(self) -> str:
        """Return the cleaned text; where the middle is left out, a line says how many bytes."""
        if not self.truncated:
            return clean_text(bytes(self._head + self._tail).decode("utf-8", "replace"))
        hidden = self.total_bytes - len(self._head) - len(self._tail)
        head, tail = (clean_text(bytes(part).decode("utf-8", "replace")) for part in (self._head, self._tail))
        return f"{head}\n… {hidden} bytes of output left out …\n{tail}"
