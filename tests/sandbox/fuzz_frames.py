"""Fuzz the frame reader: ``python tests/sandbox/fuzz_frames.py [--inputs N] [--seed N]``.

Each input is a stream of complete, changed and truncated frames that arrives in pieces. The reader may
return frames within their limits, end, or raise ``SandboxProtocolError``. It must take no more bytes of
the stream than the returned frames, one header and, where permitted, its payload. Any other result, and
an input over its budget of processor time, is printed and exits with 1.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
from contextlib import closing
from typing import Final

import fuzz_loop

from nekro.sandbox.streams import HEADER_BYTES, Frame, FrameKind, FrameReader, encode_frame
from nekro_agent.errors import SandboxProtocolError

LOOP: Final = asyncio.new_event_loop()
LIMITS: Final = {FrameKind.CALL: 200, FrameKind.EXIT: 50}
LENGTHS: Final = [0, 1, 4, 5, 6, 54, 55, 56, 204, 205, 206, 1 << 16, 1 << 31, (1 << 32) - 1]


def stream_of(chance: random.Random) -> tuple[bytes, list[Frame]]:
    """Return a stream and its leading valid frames."""
    data, expected, is_legal = b"", list[Frame](), True
    for _ in range(chance.randrange(4)):
        if chance.random() < 0.7:
            kind = chance.choice(list(LIMITS))
            payload = chance.randbytes(chance.randrange(LIMITS[kind] + 1))
            call_id = chance.randrange(1 << 32)
            data += encode_frame(kind, payload, call_id=call_id)
            if is_legal:
                expected.append(Frame(kind=kind, call_id=call_id, payload=payload))
        else:
            header = struct.pack(">IBI", chance.choice(LENGTHS), chance.randrange(10), 0)
            data += header + chance.randbytes(chance.randrange(300))
            is_legal = False
    if is_legal and chance.random() < 0.3:
        data += encode_frame(FrameKind.CALL, b"x" * 20)[: chance.randrange(29)]  # the sandbox has ended
    return data, expected


def feed(reader: asyncio.StreamReader, data: bytes, chance: random.Random) -> None:
    """Give the stream in up to three pieces."""
    first, second = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    for piece in (data[:first], data[first:second], data[second:]):
        reader.feed_data(piece)
    reader.feed_eof()


async def read_all(reader: asyncio.StreamReader) -> tuple[list[Frame], bool]:
    """Return the frames, and whether the reader refused the rest."""
    frames, found = FrameReader(reader, limits=LIMITS), list[Frame]()
    try:
        while (frame := await frames.read()) is not None:
            found.append(frame)
    except SandboxProtocolError:
        return found, True
    return found, False


async def judge(reader: asyncio.StreamReader, chance: random.Random) -> None:
    """Read one stream and judge the result."""
    data, expected = stream_of(chance)
    feed(reader, data, chance)
    found, was_refused = await read_all(reader)
    assert found[: len(expected)] == expected, data
    assert all(len(frame.payload) <= LIMITS[frame.kind] for frame in found), data
    if was_refused:
        taken = sum(HEADER_BYTES + len(frame.payload) for frame in found) + HEADER_BYTES
        assert await reader.read() == data[taken:], data


def fuzz_frames(chance: random.Random) -> None:
    """Run without an event loop: nothing of an ended stream has to be waited for."""
    judging = judge(asyncio.StreamReader(loop=LOOP), chance)
    try:
        judging.send(None)
    except StopIteration:
        return
    judging.close()
    raise AssertionError("the reader waits for more of a stream that has ended")


if __name__ == "__main__":
    with closing(LOOP):
        sys.exit(fuzz_loop.main("frames", [fuzz_frames], description="Fuzz the frame reader."))
