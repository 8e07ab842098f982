"""Stores the parts of a download while it runs, and continues from what another host has stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from nekro_agent.downloads.order import DownloadOrder
from nekro_agent.downloads.part import PartFile, PartState
from nekro_agent.ports import DownloadParts, PartialContent
from nekro_agent.tools.task_groups import in_thread

__all__ = ["PartStoring"]

#: Parts in memory at a time. The transfer waits for the store if there are more, so a kill loses few bytes.
#: With 0.1 s for each, a download of parts of 4 MiB is stored at 1 Gbit/s.
_AHEAD: Final = 3


class PartStoring:
    """The parts of one attempt; use it in one event loop."""

    def __init__(self, parts: DownloadParts, part: PartFile, order: DownloadOrder) -> None:
        self._parts = parts
        self._part = part
        self._order = order
        #: What was sent with a log-in is not for others who know its digest.
        self._is_public = not order.headers
        #: Offsets of parts that the store has or is about to have.
        self._known: set[int] = set()
        self._identity: tuple[int, str | None, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AHEAD)

    def alignment(self, whole_bytes: int) -> int:
        """Return the size whose multiples are limits of segments, so that no two have bytes of one part."""
        return self._parts.part_bytes(whole_bytes)

    async def restore(
        self, state: PartState | None, *, sha256: str | None, on_progress: Callable[[int, int | None], None]
    ) -> PartState | None:
        """Write what the store has to the partial file; returns the state of the file.

        Args:
            state: of the file as an earlier attempt on this host left it; None: it is empty.
            sha256: the content's digest, if it is known.
        """
        stored = await self._parts.find(sha256, is_public=self._is_public)
        if stored is None or not self._fits(stored, sha256):
            return state
        if state is not None and not self._may_mix(state, stored):
            await in_thread(self._part.restart)
            state = None
        await in_thread(self._part.require_space, stored.whole_bytes)
        await self._write_missing(stored, on_progress)
        is_whole = self._part.spans.total == stored.whole_bytes
        if not (is_whole or stored.validator is not None or self._order.sha256 is not None):
            await in_thread(self._part.restart)  # nothing proves that other bytes belong to these
            return None
        restored = PartState(
            inode=self._part.inode,
            url=self._order.url,
            sha256=self._order.sha256,
            validator=stored.validator if state is None else state.validator,
            whole_bytes=stored.whole_bytes,
            done=self._part.spans.copy(),
        )
        self._identity = _identity_of(restored)
        return restored

    async def grown(self, state: PartState | None, start: int, end: int) -> None:
        """Store the parts that the bytes written at an offset have completed."""
        if state is None:
            return
        size = self._parts.part_bytes(state.whole_bytes)
        if state.whole_bytes <= size:
            return
        if self._identity != _identity_of(state):
            # The content has changed; nothing of the old one may be stored after parts of the new one.
            await self._drain(cancels=True)
            self._known.clear()
            self._identity = _identity_of(state)
        for offset in range(start - start % size, end, size):
            if offset not in self._known and self._has(offset, size, state):
                self._known.add(offset)
                self._tasks.add(asyncio.create_task(self._put(state, offset, size)))
        while len(self._tasks) > _AHEAD:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            self._collect()

    async def finish(self, sha256: str) -> None:
        """Keep the whole content in the store, for other hosts and for other targets."""
        await self._drain(cancels=False)
        await self._parts.finish(
            sha256, self._part.spans.total, read=self._part.read, is_public=self._is_public
        )

    async def close(self, *, keep: bool) -> None:
        """Stop storing; forget what is stored unless a later attempt can use it."""
        await self._drain(cancels=True)
        if not keep:
            await self._parts.discard()

    def _fits(self, stored: PartialContent, sha256: str | None) -> bool:
        if stored.whole_bytes > self._order.max_bytes:
            return False
        if sha256 is not None and stored.sha256 == sha256:
            return True
        return (
            stored.url == self._order.url
            and stored.sha256 in (self._order.sha256, None)
            and stored.validator is not None
        )

    def _may_mix(self, state: PartState, stored: PartialContent) -> bool:
        if state.whole_bytes != stored.whole_bytes:
            return False
        if stored.validator is None:
            return self._order.sha256 is not None
        return state.validator == stored.validator

    async def _write_missing(
        self, stored: PartialContent, on_progress: Callable[[int, int | None], None]
    ) -> None:
        spans = self._part.spans
        missing = spans.missing(stored.whole_bytes)
        wanted = [
            (offset, size)
            for offset, size in sorted(stored.parts.items())
            if any(start < offset + size and offset < end for start, end in missing)
        ]
        self._known |= stored.parts.keys() - {offset for offset, _ in wanted}
        for first in range(0, len(wanted), _AHEAD):
            some = wanted[first : first + _AHEAD]
            read = await asyncio.gather(*(self._parts.read(offset) for offset, _ in some))
            for (offset, _), data in zip(some, read, strict=True):
                if data is not None:  # otherwise it is fetched again
                    await in_thread(self._part.write, offset, data)
                    self._known.add(offset)
            on_progress(spans.total, stored.whole_bytes)

    @staticmethod
    def _has(offset: int, size: int, state: PartState) -> bool:
        end = min(offset + size, state.whole_bytes)
        return any(start <= offset and end <= stop for start, stop in state.done)

    async def _put(self, state: PartState, offset: int, size: int) -> None:
        of = PartialContent(
            url=state.url, sha256=state.sha256, validator=state.validator, whole_bytes=state.whole_bytes
        )
        async with self._slots:
            data = await in_thread(partial(self._part.read, offset, min(size, state.whole_bytes - offset)))
            if self._part.inode == state.inode:  # otherwise it was discarded meanwhile
                await self._parts.put(of, offset, data)

    def _collect(self) -> None:
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        for task in done:
            task.result()

    async def _drain(self, *, cancels: bool) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks if cancels else ():
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in () if cancels else results:
            if result is not None:
                raise result


def _identity_of(state: PartState) -> tuple[int, str | None, int]:
    return state.inode, state.validator, state.whole_bytes
