"""Forms of answers: JSON that can contain any text, and streams of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse
from loguru import logger
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

__all__ = ["EVENT_STREAM", "SEND_SECONDS", "EventStream", "JsonAnswer", "accepts"]

EVENT_STREAM: Final = "text/event-stream"
#: Interval of a stream's comment lines, by which proxies and clients see that the connection stands.
_PING_SECONDS: Final = 15
#: How long one write to a stream or an MCP client may take; then the reader is too slow, and its stream ends.
SEND_SECONDS: Final = 30


class EventStream(EventSourceResponse):
    """A stream of server-sent events, which ends when its client takes nothing for ``SEND_SECONDS``."""

    def __init__(
        self,
        content: AsyncIterable[Any],
        *,
        headers: Mapping[str, str] | None = None,
        ping_seconds: int = _PING_SECONDS,
        sep: str | None = None,
    ) -> None:
        """Create the answer.

        Args:
            ping_seconds: interval of comment lines.
            sep: end of a line; None means CRLF.
        """
        super().__init__(content, headers=headers, ping=ping_seconds, send_timeout=SEND_SECONDS, sep=sep)
        #: Whether it was ended because its client took nothing.
        self.is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self.is_cut = True
            reason = f"its client took nothing for {self.send_timeout:g} s"
            logger.bind(reason=reason).info("event_stream_ended")
            await _cut(scope, receive)


async def _cut(scope: Scope, receive: Receive) -> None:
    """Drop the connection with what waits in it; closing it would wait for the client to take that."""
    abort: Callable[[], None] | None = scope.get("state", {}).get("abort")
    if abort is None:
        return  # a server of another kind closes the connection of an answer that is not complete
    abort()
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonAnswer(JSONResponse):
    """Like ``JSONResponse``, in ASCII: a chat may contain lone surrogates, which UTF-8 does not have."""

    def render(self, content: Any) -> bytes:
        """Encode; everything outside of ASCII is escaped."""
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def accepts(request: Request, media_type: str) -> bool:
    """Whether the request's ``Accept`` names a media type; patterns do not count."""
    stated = ",".join(request.headers.getlist("accept")).split(",")
    return media_type in {item.partition(";")[0].strip().lower() for item in stated}
