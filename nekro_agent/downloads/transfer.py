"""Transfers the content of one URL into a ``PartFile``, in segments, with retries after a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nekro_agent.downloads.http import DownloadSource, Interrupted, RetryLimit, UnreadResponse
from nekro_agent.downloads.part import PartFile, PartState
from nekro_agent.downloads.socket import BLOCK_BYTES
from nekro_agent.errors import DownloadError, DownloadRefusedError
from nekro_agent.runtime import DownloadPolicy
from nekro_agent.tools.task_groups import in_thread, result_unless_failed, run_together

__all__ = ["Content", "Transfer"]

#: Reads return blocks. With a slow server, the written and reported position lags by less than this.
_WRITE_BYTES: Final = BLOCK_BYTES // 2
#: Least and largest segment; small enough that all connections finish at about the same time.
_LEAST_SEGMENT_BYTES: Final = 4 << 20
_MOST_SEGMENT_BYTES: Final = 64 << 20
#: How often the received ranges are saved; a crash loses at most this much time.
_SAVE_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Content:
    """Properties of the content that the server stated."""

    #: URL of the content, after redirects.
    url: str
    content_type: str | None
    #: The header that may state a file name, as it came.
    disposition: bytes | None = None


class _StartOver(Exception):
    """The partial file cannot be used: the content changed, or the server does not send ranges."""


@dataclass
class _Segment:
    position: int
    #: None: unknown, until the server has sent everything.
    end: int | None

    @property
    def is_done(self) -> bool:
        return self.end is not None and self.position >= self.end


class Transfer:
    """One attempt to transfer the content; call ``run`` once."""

    def __init__(
        self,
        source: DownloadSource,
        part: PartFile,
        *,
        policy: DownloadPolicy,
        max_bytes: int,
        sha256: str | None,
        state: PartState | None,
        on_progress: Callable[[int, int | None], None],
        on_written: Callable[[PartState | None, int, int], Awaitable[None]] | None = None,
        alignment: Callable[[int], int] | None = None,
    ) -> None:
        """Create the transfer.

        Args:
            state: the state that an earlier attempt left in ``part``; None if it is empty.
            on_progress: called with the received bytes and the whole size; an exception ends the
                transfer.
            on_written: called with the state and the range of the bytes that were written; the connection
                waits for it.
            alignment: returns, for the whole size, the size whose multiples are limits of segments.
        """
        self._source = source
        self._part = part
        self._policy = policy
        self._max_bytes = max_bytes
        self._sha256 = sha256
        self._on_progress = on_progress
        self._on_written = on_written
        self._alignment = alignment
        self._validator = state.validator if state else None
        self._whole = state.whole_bytes if state else None
        #: False once the server has ignored a range request.
        self._sends_ranges = True
        self._accepts_ranges = False
        self._retry_limit = RetryLimit(policy)
        self._grown = asyncio.Event()
        if part.spans.total:
            self._grown.set()

    @property
    def may_go_on(self) -> bool:
        """Whether a later attempt can use what is on disk."""
        return self._whole is not None and self._can_resume and self._part.spans.total > 0

    @property
    def state(self) -> PartState | None:
        """The state for a later attempt; None if it cannot resume."""
        if self._whole is None or not self.may_go_on:
            return None
        return PartState(
            inode=self._part.inode,
            url=self._source.url,
            sha256=self._sha256,
            validator=self._validator,
            whole_bytes=self._whole,
            done=self._part.spans.copy(),
        )

    async def run(self) -> Content:
        """Transfer and hash the whole content.

        Raises:
            DownloadError: the server could not be reached, refused, broke off too often, or sends
                different content each time.
            DownloadRefusedError: the content is too large or not acceptable.
        """
        keepers = [asyncio.create_task(self._hash_along()), asyncio.create_task(self._save_now_and_then())]
        try:
            return await result_unless_failed(self._run(), *keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _run(self) -> Content:
        while True:
            try:
                return await self._attempt()
            except _StartOver as exc:
                await in_thread(self._part.restart)
                await self._retry_limit.after(exc, held_bytes=0)
            except Interrupted as exc:
                await self._after_cut(exc)

    async def _attempt(self) -> Content:
        """Request the missing bytes, or everything, and transfer them."""
        gaps = self._part.spans.missing(self._whole) if self._whole is not None else []
        if self._whole is not None and not gaps and self._part.spans.total == self._whole:
            return Content(url=self._source.url, content_type=None)
        start, end = gaps[0][0] if gaps else 0, None
        if start and self._can_resume:
            # Only the first segment: what a server has sent of others when the connection is closed is lost.
            self._accepts_ranges, end = True, self._segments(start)[0].end
        async with self._source.open(
            start=start, end=end, validator=self._validator if start else None
        ) as answer:
            await self._admit(answer, start)
            await self._bring(answer, start)
        if self._whole is None:
            self._whole = self._part.spans.prefix
        if self._part.spans.total != self._whole:
            raise Interrupted(f"sent {self._part.spans.total} of {self._whole} bytes")
        self._on_progress(self._whole, self._whole)
        return Content(url=answer.url, content_type=answer.content_type, disposition=answer.disposition)

    async def _admit(self, answer: UnreadResponse, start: int) -> None:
        """Check the first answer of an attempt and record its properties.

        Raises:
            _StartOver: the answer is not for the content on disk.
        """
        self._retry_limit.has_answer = True
        # Without the beginning everything is requested, but what is on disk must belong to the same content.
        self._refuse_encoded_part(answer)
        if (start and answer.status != 206) or (self._part.spans.total and self._is_other(answer)):
            self._reject(answer)
        if answer.status == 416:
            raise DownloadError(f"{answer.url} answered 416")
        if answer.start != start:
            raise DownloadError(f"{answer.url} sends bytes from {answer.start}, requested from {start}")
        if answer.whole_bytes is not None and answer.whole_bytes > self._max_bytes:
            raise DownloadRefusedError(
                f"{answer.url} has {answer.whole_bytes} bytes, the limit is {self._max_bytes}"
            )
        self._validator = answer.validator
        self._whole = answer.whole_bytes
        self._accepts_ranges = self._sends_ranges and answer.accepts_ranges is True
        if self._whole is not None:
            await in_thread(self._part.require_space, self._whole)

    def _refuse_encoded_part(self, answer: UnreadResponse) -> None:
        """Request everything if a server encodes a range: it does not fit to ranges of the content."""
        if answer.status == 206 and answer.encoding is not None:
            self._sends_ranges = False
            self._validator = self._whole = None
            raise _StartOver(f"{answer.url} sends ranges of a body that is encoded as {answer.encoding}")

    def _is_other(self, answer: UnreadResponse) -> bool:
        return answer.whole_bytes != self._whole or (
            self._validator is not None and answer.validator != self._validator
        )

    def _reject(self, answer: UnreadResponse) -> None:
        if answer.status == 200 and not self._is_other(answer):
            self._sends_ranges = False
            raise _StartOver(f"{answer.url} ignores ranges")
        self._validator = self._whole = None
        raise _StartOver(f"{answer.url} changes while it is fetched")

    async def _bring(self, answer: UnreadResponse, start: int) -> None:
        segments = self._segments(start)
        waiting = iter(segments[1:])

        async def work(first: tuple[_Segment, UnreadResponse] | None = None) -> None:
            if first is not None:
                await self._complete(*first)
            for segment in waiting:
                await self._complete(segment)

        workers = min(self._policy.connections, len(segments))
        await run_together(work((segments[0], answer)), *(work() for _ in range(workers - 1)))

    def _segments(self, start: int) -> list[_Segment]:
        """Split the missing bytes if they are many and the server is known to support ranges."""
        if self._whole is None:
            return [_Segment(start, None)]
        gaps = self._part.spans.missing(self._whole)
        missing = sum(end - begin for begin, end in gaps)
        if len(gaps) <= 1 and not self._is_worth_splitting(missing):
            return [_Segment(start, self._whole)]
        share = missing // (4 * self._policy.connections)
        unit = 1 if self._alignment is None else self._alignment(self._whole)
        size = max(unit, min(max(share, _LEAST_SEGMENT_BYTES), _MOST_SEGMENT_BYTES) // unit * unit)
        return [
            _Segment(max(gap, begin), min(begin + size, end))
            for gap, end in gaps
            for begin in range(gap // unit * unit, end, size)
        ] or [_Segment(start, self._whole)]

    def _is_worth_splitting(self, missing: int) -> bool:
        return (
            self._policy.connections > 1
            and missing >= self._policy.parallel_min_bytes
            and self._can_resume
            and self._accepts_ranges
        )

    async def _complete(self, segment: _Segment, answer: UnreadResponse | None = None) -> None:
        """Transfer one segment, over as many connections as needed."""
        while True:
            try:
                if answer is not None:
                    await self._receive(segment, answer)
                elif not segment.is_done:
                    await self._receive_more(segment)
                return
            except Interrupted as exc:
                if not self._can_resume or segment.end is None:
                    raise
                await self._retry_limit.after(exc, held_bytes=self._part.spans.total)
                answer = None

    async def _receive_more(self, segment: _Segment) -> None:
        async with self._source.open(
            start=segment.position, end=segment.end, validator=self._validator
        ) as answer:
            self._refuse_encoded_part(answer)
            if answer.status != 206 or self._is_other(answer):
                self._reject(answer)
            if answer.start != segment.position:
                raise DownloadError(
                    f"{answer.url} sends bytes from {answer.start}, requested from {segment.position}"
                )
            await self._receive(segment, answer)

    async def _receive(self, segment: _Segment, answer: UnreadResponse) -> None:
        """Stream a body to disk; what was received is written even if the server breaks off."""
        pieces: list[bytes] = []
        size = 0
        try:
            async for chunk in answer.chunks():
                pieces.append(chunk)
                size += len(chunk)
                self._check_size(segment.position + size, answer.url)
                if size >= _WRITE_BYTES or self._reaches_end(segment, size):
                    await self._write(segment, pieces)
                    pieces, size = [], 0
                if segment.is_done and answer.end != segment.end:
                    return  # the rest belongs to other segments
        finally:
            if pieces:
                await self._write(segment, pieces)
            if answer.end != segment.end:
                # Close it now, because this worker's next request needs the connection's slot in the pool.
                await answer.response.aclose()
        if not segment.is_done and segment.end is not None:
            raise Interrupted(f"the body ended after {segment.position} bytes")

    @staticmethod
    def _reaches_end(segment: _Segment, size: int) -> bool:
        return segment.end is not None and segment.position + size >= segment.end

    def _check_size(self, size: int, url: str) -> None:
        if self._whole is None and size > self._max_bytes:
            raise DownloadRefusedError(f"{url} sends more than the limit of {self._max_bytes} bytes")

    async def _write(self, segment: _Segment, pieces: Sequence[bytes]) -> None:
        size = sum(map(len, pieces))
        beyond = 0 if segment.end is None else segment.position + size - segment.end
        if beyond > 0:
            pieces, size = [b"".join(pieces)[: size - beyond]], size - beyond
        await in_thread(self._part.write, segment.position, *pieces)
        segment.position += size
        if self._part.is_hash_behind:
            self._grown.set()
        self._on_progress(self._part.spans.total, self._whole)
        if self._on_written is not None:
            await self._on_written(self.state, segment.position - size, segment.position)

    async def _after_cut(self, exc: Interrupted) -> None:
        held = self._part.spans.total
        reason = exc
        if held:
            reason = Interrupted(
                f"{self._source.url} broke off after {held} bytes: {exc}",
                status=exc.status,
                pause_seconds=exc.pause_seconds,
            )
        await self._retry_limit.after(reason, held_bytes=held)
        if self._whole is None or not self._can_resume:
            await in_thread(self._part.restart)

    @property
    def _can_resume(self) -> bool:
        # Without a validator only the digest can prove that the parts belong to one content.
        return self._sends_ranges and (self._validator is not None or self._sha256 is not None)

    async def _hash_along(self) -> None:
        while True:
            await self._grown.wait()
            self._grown.clear()
            while await in_thread(self._part.hash_more):
                pass

    async def _save_now_and_then(self) -> None:
        saved: PartState | None = None
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            state = self.state
            if state is not None and state != saved:
                await in_thread(self._part.save, state)
                saved = state
