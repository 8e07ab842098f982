"""Limits on the answers that HTTP clients read: a few bytes can be decoded to any number.

httpx decodes a body by its ``Content-Encoding``, and each chunk at once, before anything can count it: 64 KiB
of gzip become 64 MiB, and two layers of it 64 GiB. Clients with these hooks ask for plain bodies, decode one
layer in small steps, and end an answer that becomes too large.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any, Final

import httpx

__all__ = ["AnswerTooLargeError", "EncodedAnswerError", "limited", "limited_blocking"]

#: Largest answer, unless another limit is stated.
_MOST_BYTES: Final = 64 << 20
#: Bytes that are decoded at once.
_STEP_BYTES: Final = 64 << 10
_PLAIN: Final = "identity"
_GZIP: Final = ("gzip", "x-gzip")
#: ``wbits`` of zlib: gzip, deflate with the header of zlib, and deflate without one.
_GZIP_BITS: Final = zlib.MAX_WBITS | 16
#: The first byte of deflate with a header has the method 8 and a window of at most 32 KiB.
_HEADED: Final = frozenset(8 | window << 4 for window in range(8))


class AnswerTooLargeError(httpx.RequestError):
    """An answer has more bytes than its reader takes."""


class EncodedAnswerError(httpx.DecodingError):
    """An answer is encoded in a way that was not asked for and that is not decoded."""


def limited(most_bytes: int | None = _MOST_BYTES) -> dict[str, list[Callable[..., Any]]]:
    """Return the ``event_hooks`` of an asynchronous client of httpx or httpx2.

    Reading an answer raises ``AnswerTooLargeError`` or ``EncodedAnswerError``, which are ``httpx.HTTPError``.

    Args:
        most_bytes: largest body, after decoding; None limits only bodies that are encoded. A stream of events
            has no limit as a whole, because its parser limits each event.
    """

    async def ask(request: httpx.Request) -> None:
        request.headers["accept-encoding"] = _PLAIN

    async def limit(response: httpx.Response) -> None:
        body = _async_body(type(response).__module__.partition(".")[0])
        response.stream = body(response.stream, _Reading(response, most_bytes))

    return {"request": [ask], "response": [limit]}


def limited_blocking(most_bytes: int | None = _MOST_BYTES) -> dict[str, list[Callable[..., Any]]]:
    """Return the ``event_hooks`` of a blocking client; as ``limited``."""

    def ask(request: httpx.Request) -> None:
        request.headers["accept-encoding"] = _PLAIN

    def limit(response: httpx.Response) -> None:
        stream = response.stream
        assert isinstance(stream, httpx.SyncByteStream)  # noqa: S101 - of a blocking client
        response.stream = _Body(stream, _Reading(response, most_bytes))

    return {"request": [ask], "response": [limit]}


class _Reading:
    """Decodes and counts one body."""

    def __init__(self, response: httpx.Response, most_bytes: int | None) -> None:
        self._request = response.request
        self._coding = response.headers.get("content-encoding", _PLAIN).strip().lower()
        if self._coding not in (_PLAIN, "deflate", *_GZIP):
            raise EncodedAnswerError(
                f"{self._host} answers with the encoding {self._coding[:40]!r}, which was not asked for",
                request=self._request,
            )
        is_encoded = self._coding != _PLAIN
        if is_encoded:
            # The body that httpx gets is decoded.
            del response.headers["content-encoding"]
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        self._most = None if is_stream else most_bytes
        if self._most is None and is_encoded and not is_stream:
            self._most = _MOST_BYTES
        self._decoder: Any = zlib.decompressobj(_GZIP_BITS) if self._coding in _GZIP else None
        self._size = 0

    @property
    def _host(self) -> str:
        return self._request.url.host or "the server"

    def decoded(self, chunk: bytes) -> Iterator[bytes]:
        """Yield a chunk of the body, decoded, in pieces.

        Raises:
            AnswerTooLargeError, httpx.DecodingError: as their names say.
        """
        for piece in self._pieces(chunk) if self._coding != _PLAIN else (chunk,):
            self._size += len(piece)
            if self._most is not None and self._size > self._most:
                raise AnswerTooLargeError(
                    f"{self._host} answers with more than {self._most} bytes", request=self._request
                )
            yield piece

    def _pieces(self, chunk: bytes) -> Iterator[bytes]:
        if self._decoder is None and chunk:
            self._decoder = zlib.decompressobj(zlib.MAX_WBITS if chunk[0] in _HEADED else -zlib.MAX_WBITS)
        try:
            while chunk:
                if self._decoder.eof:  # a body may consist of several gzip files
                    self._decoder = zlib.decompressobj(_GZIP_BITS)
                yield self._decoder.decompress(chunk, _STEP_BYTES)
                chunk = self._decoder.unconsumed_tail or self._decoder.unused_data
        except zlib.error as exc:
            raise httpx.DecodingError(f"{self._host}: {exc}", request=self._request) from exc


@cache
def _async_body(library: str) -> Any:
    """Return the class of bodies for httpx, or for httpx2, which is the same and checks for its own class."""
    return type("_AsyncBody", (_AsyncBody, sys.modules[library].AsyncByteStream), {})


class _AsyncBody:
    def __init__(self, inner: httpx.AsyncByteStream, reading: _Reading) -> None:
        self._inner, self._reading = inner, reading

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            for piece in self._reading.decoded(chunk):
                yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, reading: _Reading) -> None:
        self._inner, self._reading = inner, reading

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            yield from self._reading.decoded(chunk)

    def close(self) -> None:
        self._inner.close()
