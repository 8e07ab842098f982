"""Forms of answers: JSON that can contain any text, streams of server-sent events, and files.

JSON may hold lone surrogates, which output of code and plugins can have. Files are served with ranges,
validators, and headers that keep them passive in a browser.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, BinaryIO, Final
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from loguru import logger
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from nekro_agent.files.names import IMAGE_TYPES

__all__ = [
    "EVENT_STREAM",
    "SEND_SECONDS",
    "EventResponse",
    "JsonAnswer",
    "accepts",
    "etag_of",
    "file_response",
    "has_etag",
]


EVENT_STREAM: Final = "text/event-stream"
#: Interval of a stream's comment lines, which show proxies and clients that the connection stands.
_PING_SECONDS: Final = 15
#: How long one write to a stream or an MCP client may take; then the reader is too slow, and its stream ends.
SEND_SECONDS: Final = 30


class EventResponse(EventSourceResponse):
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


_CHUNK_BYTES: Final = 256 << 10

_RANGE: Final = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")
#: A file is data of other people: a browser must neither run it nor guess another type.
_PASSIVE: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Referrer-Policy": "no-referrer",
}


def etag_of(*, size_bytes: int, modified_ns: int) -> str:
    """Return the validator of a file's content."""
    return f'"{size_bytes:x}-{modified_ns:x}"'


def file_response(
    request: Request,
    file: BinaryIO,
    opened: ExitStack,
    *,
    name: str,
    media_type: str,
    size: int,
    etag: str,
    headers: Mapping[str, str],
) -> Response:
    """Return the answer to a request for a file.

    A request for one range is answered with it; other ranges are not understood, as the standard permits,
    and answered with the whole file. Pictures are shown by browsers, other files are saved.

    Source: RFC 9110, sections 13 and 14.

    Args:
        opened: closes the file; this function takes it over.
    """
    disposition = "inline" if media_type in IMAGE_TYPES else "attachment"
    answer = {
        **_PASSIVE,
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"{disposition}; filename*=UTF-8''{quote(name, safe='', errors='replace')}",
        **headers,
    }
    if has_etag(request.headers.get("if-none-match"), etag):
        opened.close()
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=answer)
    wanted = _range(request, size, etag)
    if wanted is None:
        opened.close()
        answer["Content-Range"] = f"bytes */{size}"
        return Response(status_code=HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers=answer)
    start, end, is_part = wanted
    answer |= {"Content-Type": media_type, "Content-Length": str(end - start)}
    if is_part:
        answer["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
    if request.method == "HEAD":
        opened.close()
        return Response(status_code=status, headers=answer)
    return StreamingResponse(_pieces(file, opened, start, end), status_code=status, headers=answer)


async def _pieces(file: BinaryIO, opened: ExitStack, start: int, end: int) -> AsyncIterator[bytes]:
    with opened:
        await asyncio.to_thread(file.seek, start)
        while start < end:
            piece = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, end - start))
            if not piece:  # it was truncated meanwhile; the server closes the connection
                return
            start += len(piece)
            yield piece


def _range(request: Request, size: int, etag: str) -> tuple[int, int, bool] | None:
    """Return start, end, and whether that is a part; None if the range is outside of the file."""
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or request.headers.get("if-range", etag) != etag:
        return 0, size, False
    if match[3] is not None:  # the last bytes
        length = min(int(match[3]), size)
        return (size - length, size, True) if length else None
    start = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    if match[2] and int(match[2]) < start:
        return 0, size, False  # not a valid range
    return (start, end, True) if start < size else None


def has_etag(header: str | None, etag: str) -> bool:
    """Whether a header `If-None-Match` names a validator."""
    tags = [tag.strip().removeprefix("W/") for tag in (header or "").split(",")]
    return etag in tags or "*" in tags
