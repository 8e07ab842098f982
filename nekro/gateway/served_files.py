"""Answers with the content of a file: ranges, validators, and headers that keep it passive in a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import BinaryIO, Final
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from nekro_agent.files.media_types import IMAGE_TYPES

__all__ = ["etag_of", "file_response", "has_etag"]

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
