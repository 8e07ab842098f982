"""Frames on the socket between a sandbox and its bridge.

A frame is ``u32 length | u8 type | u32 call id | payload``; the length counts the bytes after
it. Each type has one direction and a largest payload, and the bridge knows which types are
legal in which state: any other frame ends the run with SECURITY. ``nekro.sandbox.guest.channel``
implements the same format inside, without importing this module.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from nekro_agent.errors import SandboxProtocolError

__all__ = ["HEADER_BYTES", "PROTOCOL", "Frame", "FrameKind", "FrameReader", "encode_frame"]

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
