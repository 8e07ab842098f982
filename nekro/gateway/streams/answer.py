"""The answers to readers of events: those of a chat, and changes of all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from enum import StrEnum
from typing import Final

from loguru import logger
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from nekro.base.metrics import metrics
from nekro.gateway.streams.events import Position, StreamEvent, lost_frame
from nekro.gateway.streams.hub import EventsLostError, SlowReaderError
from nekro.gateway.web.responses import EventStream

__all__ = ["ChangeAnswer", "StreamAnswer"]

#: After a lost connection browsers wait this long before they connect again.
_RETRY: Final = b"retry: 1000\r\n\r\n"


class _End(StrEnum):
    """Why a stream ended; a label of its metric."""

    #: The client closed the connection.
    LEFT = "left"
    #: The client did not take its events.
    SLOW = "slow"
    #: The database has lost events that the client has.
    LOST = "lost"
    #: The gateway stops.
    STOPPED = "stopped"


class _CountedStream(EventStream):
    """A stream of server-sent events that the metrics count."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames)
        self._end = _End.LEFT

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the client leaves."""
        metrics().streams_open.inc()
        try:
            await super().__call__(scope, receive, send)
        finally:
            metrics().streams_open.dec()
            metrics().stream_ends.labels((_End.SLOW if self.is_cut else self._end).value).inc()


class ChangeAnswer(_CountedStream):
    """Streams hints as server-sent events."""

    def __init__(self, stream: AsyncGenerator[bytes, None]) -> None:
        super().__init__(self._frames(stream))

    async def _frames(self, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        yield _RETRY
        sent = metrics().stream_events.labels("change")
        async with aclosing(stream) as changes:
            async for frames in changes:
                sent.inc()
                yield frames
        self._end = _End.STOPPED


class StreamAnswer(_CountedStream):
    """Streams the events of a chat as server-sent events."""

    def __init__(self, chat_key: str, stream: AsyncGenerator[StreamEvent, None], begin: Position) -> None:
        """Create the answer.

        Args:
            begin: where the stream begins.
        """
        super().__init__(self._frames(chat_key, stream, begin))

    async def _frames(
        self, chat_key: str, stream: AsyncGenerator[StreamEvent, None], begin: Position
    ) -> AsyncIterator[bytes]:
        # So that the reader misses nothing when it loses the connection before an event.
        yield f"id: {begin}\r\n".encode() + _RETRY
        kept, live = (metrics().stream_events.labels(kind) for kind in ("kept", "live"))
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    (live if event.number is None else kept).inc()
                    yield event.frame
            self._end = _End.STOPPED
        except SlowReaderError as exc:
            self._end = _End.SLOW
            logger.bind(reason=str(exc)).info("event_stream_ended")
        except EventsLostError as exc:
            self._end = _End.LOST
            yield lost_frame(chat_key, exc.after)
