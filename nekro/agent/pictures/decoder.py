"""Makes pictures small enough for prompts, each in a confined process, and keeps the results.

Pictures come from people and plugins, and decoders are large C libraries: a process without files, network
and further processes decodes each picture once, with limits on its memory and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from nekro.agent.text import attribute
from nekro_agent.errors import SandboxUnavailableError
from nekro_agent.files.names import picture_type

__all__ = ["DecodeLimits", "PictureDecoder", "ShownPicture", "UnshownPicture"]

_PROGRAM: Final = Path(__file__).with_name("program.py")
#: CPU time of one picture; the largest that the limits allow takes about 2 s.
_CPU_SECONDS: Final = 10
#: Time for one picture on a busy host.
_WALL_SECONDS: Final = 30.0
#: Address space of the interpreter and its libraries, and of each pixel in all copies.
_BASE_BYTES: Final = 256 << 20
_BYTES_PER_PIXEL: Final = 12
#: Pictures of one worker that are decoded at the same time; each uses a processor.
_AT_ONCE: Final = 2
#: Bytes of results that are kept; a prompt repeats the pictures of the one before it.
_KEPT_BYTES: Final = 64 << 20
#: What a result counts besides its picture.
_ENTRY_BYTES: Final = 512


@dataclass(frozen=True, kw_only=True)
class DecodeLimits:
    """Limits of one picture.

    ``side`` (pixels) and ``bytes`` limit the result, ``pixels`` the picture before it is scaled.
    """

    side: int
    bytes: int
    pixels: int


@dataclass(frozen=True, kw_only=True)
class ShownPicture:
    """A picture as a prompt shows it: PNG or JPEG without metadata, upright.

    ``was`` is (width, height) in pixels before scaling; of an animation, this is the first frame.
    """

    media_type: str
    content: bytes
    width: int
    height: int
    was: tuple[int, int]
    is_animated: bool

    @property
    def is_scaled(self) -> bool:
        """Whether it has fewer pixels than before."""
        return self.was != (self.width, self.height)


@dataclass(frozen=True, kw_only=True)
class UnshownPicture:
    """Why a picture cannot be shown."""

    reason: str


_Result = ShownPicture | UnshownPicture


class PictureDecoder:
    """Decodes each picture once; bound to the event loop of its first use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, DecodeLimits], _Result] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[tuple[str, DecodeLimits], asyncio.Task[_Result]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        #: Processes started so far.
        self.started = 0

    async def decode(self, data: bytes, limits: DecodeLimits) -> _Result:
        """Return a picture as a prompt may show it, or why it cannot be shown; never raises for a picture."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        key = (digest, limits)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._decode(key, data))
        # One round that is cancelled does not end the work that another one waits for.
        return await asyncio.shield(self._running[key])

    async def _decode(self, key: tuple[str, DecodeLimits], data: bytes) -> _Result:
        try:
            async with self._slots:
                result = await self._run(data, key[1])
        except (OSError, SandboxUnavailableError) as exc:
            # Of this host and not of the picture, so it is not kept.
            return UnshownPicture(reason=f"this host cannot decode pictures: {exc}")
        finally:
            del self._running[key]
        self._keep(key, result)
        return result

    async def _run(self, data: bytes, limits: DecodeLimits) -> _Result:
        self.started += 1
        program = _filter()
        given = {
            "filter_bytes": len(program),
            "side": limits.side,
            "bytes": limits.bytes,
            "pixels": limits.pixels,
            "memory_bytes": _BASE_BYTES + limits.pixels * _BYTES_PER_PIXEL + len(data),
            "cpu_seconds": _CPU_SECONDS,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(_PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Nothing of this process's secrets; a pool of threads would count against the memory.
            env={"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_WALL_SECONDS):
                output = await _exchange(process, json.dumps(given).encode() + b"\n" + program, data, limits)
                await process.wait()
        except TimeoutError:
            return UnshownPicture(reason="decoding it takes too long")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            return UnshownPicture(reason="its decoder failed, or needed too much memory or time")
        return _result(output, limits)

    def _keep(self, key: tuple[str, DecodeLimits], result: _Result) -> None:
        self._kept[key] = result
        self._kept_bytes += _size(result)
        while self._kept_bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= _size(oldest)


async def _exchange(
    process: asyncio.subprocess.Process, head: bytes, data: bytes, limits: DecodeLimits
) -> bytes:
    """Write the input and read the output, at most a little more than a valid one has."""
    source, target = process.stdout, process.stdin
    if source is None or target is None:
        raise OSError("the decoder has no pipes")

    async def write() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            target.write(head)
            target.write(data)
            await target.drain()
        target.close()

    writing = asyncio.create_task(write())
    try:
        pieces, left = [], limits.bytes + 4096
        while left > 0 and (piece := await source.read(left)):
            pieces.append(piece)
            left -= len(piece)
        if left <= 0:
            process.kill()
            while await source.read(1 << 16):
                pass
        await writing
    finally:
        writing.cancel()
    return b"".join(pieces)


def _result(output: bytes, limits: DecodeLimits) -> _Result:
    """Check what the process wrote: a picture may have taken it over."""
    line, _, content = output.partition(b"\n")
    try:
        facts: Any = json.loads(line)
        if "error" in facts:
            return UnshownPicture(reason=attribute(str(facts["error"]), limit=200))
        width, height, was_width, was_height = (
            int(number) for number in (facts["width"], facts["height"], *facts["was"])
        )
        is_animated = facts["animated"] is True
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return UnshownPicture(reason="its decoder failed")
    media_type = picture_type(content[:16])
    is_valid = 1 <= width <= limits.side and 1 <= height <= limits.side and len(content) <= limits.bytes
    if media_type not in ("image/png", "image/jpeg") or not is_valid:
        return UnshownPicture(reason="its decoder failed")
    return ShownPicture(
        media_type=media_type,
        content=content,
        width=width,
        height=height,
        was=(was_width, was_height),
        is_animated=is_animated,
    )


def _size(result: _Result) -> int:
    return _ENTRY_BYTES + (len(result.content) if isinstance(result, ShownPicture) else 0)


@cache
def _filter() -> bytes:
    # Imported here because gateways import rounds' types, and load nothing of the sandbox but its types.
    from nekro.sandbox.filter.seccomp import computing_filter

    return computing_filter()
