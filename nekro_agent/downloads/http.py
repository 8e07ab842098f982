"""Requests of a download: redirects, ranges, validators, encodings, and when a request is repeated.

Each address is checked before connecting. Bodies that a server compresses although it was asked not to are
decoded.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpcore

from nekro_agent.downloads.addresses import (
    AddressPolicy,
    Cookies,
    checked_url,
    headers_after,
    redirected,
)
from nekro_agent.downloads.socket import BLOCK_BYTES, CheckedBackend, GatheringStream
from nekro_agent.durations import FRESH_SECONDS, stated_pause
from nekro_agent.errors import DownloadError, DownloadRefusedError
from nekro_agent.runtime import DownloadPolicy

__all__ = [
    "DownloadSource",
    "Interrupted",
    "RetryLimit",
    "UnreadResponse",
    "decoded",
    "encoding_of",
]


class Interrupted(Exception):
    """The server could not be reached or broke off; the same request may succeed later."""

    def __init__(self, reason: str, *, status: int | None = None, pause_seconds: float | None = None) -> None:
        """
        Args:
            status: what the server answered; None if it did not.
            pause_seconds: after how long it wants to be asked again; None if it does not say.
        """
        super().__init__(reason)
        self.status = status
        self.pause_seconds = pause_seconds

    @property
    def is_busy(self) -> bool:
        """Whether the server works, and asks for another request later."""
        return self.status == HTTPStatus.TOO_MANY_REQUESTS or (
            self.status == HTTPStatus.SERVICE_UNAVAILABLE and self.pause_seconds is not None
        )


class RetryLimit:
    """Limits consecutive attempts of a transfer that bring no new bytes."""

    def __init__(self, policy: DownloadPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._best = 0
        self._paused_until = 0.0
        #: When a server first asked for a pause since the last new bytes; None: it has not.
        self._busy_since: float | None = None
        #: A server that has never answered is not retried here; the caller decides.
        self.has_answer = False

    async def after(self, reason: Exception, *, held_bytes: int) -> None:
        """Pause before the next attempt.

        A pause that a server asks for is kept and is no failure, as long as it ends within the longest time
        without data.

        Raises:
            DownloadError: no further attempt is allowed.
        """
        is_new = held_bytes > self._best
        if is_new:
            self._best, self._failures, self._busy_since = held_bytes, 0, None
        is_busy = isinstance(reason, Interrupted) and reason.is_busy
        if isinstance(reason, Interrupted) and is_busy and reason.pause_seconds is not None:
            pause = self._stated(reason, reason.pause_seconds)
        else:
            self._failures += not is_new
            if not (self.has_answer or is_busy) or self._failures >= self._policy.tries:
                raise DownloadError(str(reason)) from reason
            pause = self._policy.retry_seconds * 2**self._failures
        # Connections that broke at the same time share one pause.
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        await asyncio.sleep(self._paused_until - time.monotonic())

    def _stated(self, reason: Interrupted, seconds: float) -> float:
        now, most = time.monotonic(), self._policy.timeout_seconds
        if self._busy_since is None:
            self._busy_since = now
        pause = max(seconds, FRESH_SECONDS)  # a date may be over when it arrives
        if now + pause - self._busy_since > most:
            raise DownloadError(
                f"{reason} and asks for a pause of {seconds:g} s; downloads wait {most:g} s at most"
            ) from reason
        return pause


_GZIP: Final = frozenset({"gzip", "x-gzip"})
#: For ``zlib.decompressobj``: a gzip header, and one of zlib.
_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def encoding_of(header: str | None, *, url: str) -> str | None:
    """Return the encoding of a body, ``gzip`` or ``deflate``; None if it is not encoded.

    Raises:
        DownloadRefusedError: it has another encoding, or several.
    """
    names = [name.strip().lower() for name in (header or "").split(",")]
    names = ["gzip" if name in _GZIP else name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _WINDOWS:
        raise DownloadRefusedError(
            f"{url} sends its content encoded as {', '.join(names)[:100]!r}, although it was asked not to"
        )
    return names[0]


async def decoded(body: AsyncIterator[bytes], encoding: str, *, url: str) -> AsyncIterator[bytes]:
    """Yield the decoded body in blocks of limited size, however much a piece of it expands.

    Raises:
        DownloadError: it is not encoded as stated.
        Interrupted: it ends too early.
    """
    decoder = zlib.decompressobj(_WINDOWS[encoding])
    async for piece in body:
        while piece:
            if decoder.eof:  # the next of several members
                decoder = zlib.decompressobj(_WINDOWS[encoding])
            try:
                block = decoder.decompress(piece, BLOCK_BYTES)
            except zlib.error as exc:
                raise DownloadError(f"{url} sends a body that is not encoded as {encoding}: {exc}") from exc
            if block:
                yield block
            piece = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    if not decoder.eof:
        raise Interrupted(f"{url} broke off within a body that is encoded as {encoding}")


_MAX_REDIRECTS: Final = 10

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
#: Temporary failures: the same request may succeed later.
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})

_BROKEN: Final = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)

_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")


@dataclass(frozen=True, kw_only=True)
class UnreadResponse:
    """A response whose body has not been read yet."""

    #: URL of the response, after redirects.
    url: str
    #: 200, 206 or 416.
    status: int
    #: The body contains the bytes from ``start`` to before ``end``; None if the server does not say.
    start: int
    end: int | None
    #: Size of the whole content; None if the server does not say.
    whole_bytes: int | None
    #: Equal in two answers with the same content: a strong ETag, else Last-Modified.
    validator: str | None
    #: Whether the server supports ranges; None if it does not say.
    accepts_ranges: bool | None
    content_type: str | None
    #: The header that may state a file name, as it came.
    disposition: bytes | None
    #: How the body is encoded, although no encoding was asked for; None: it is not.
    encoding: str | None
    response: httpcore.Response

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body, decoded.

        Raises:
            Interrupted: the server broke off or stopped sending.
            DownloadError: it is not encoded as stated.
        """
        if self.encoding is None:
            return self._chunks()
        return decoded(self._chunks(), self.encoding, url=self.url)

    async def _chunks(self) -> AsyncIterator[bytes]:
        stream: GatheringStream = self.response.extensions["network_stream"]
        try:
            stream.gather(is_body=True)
            async for chunk in self.response.aiter_stream():
                yield chunk
        except _BROKEN as exc:
            raise Interrupted(_reason(exc)) from exc
        finally:
            # The headers of the next answer must be returned at once.
            stream.gather(is_body=False)


class DownloadSource:
    """One URL; used with ``async with``, for up to ``connections`` concurrent requests."""

    def __init__(
        self,
        url: str,
        *,
        addresses: AddressPolicy,
        silence_seconds: float,
        connections: int,
        headers: Mapping[str, str],
    ) -> None:
        self.url = url
        self._headers = dict(headers)
        self._timeouts = dict.fromkeys(("connect", "read", "write", "pool"), silence_seconds)
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=CheckedBackend(addresses), max_connections=connections
        )

    async def __aenter__(self) -> DownloadSource:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._pool.__aexit__(*exc_info)

    @asynccontextmanager
    async def open(
        self, *, start: int = 0, end: int | None = None, validator: str | None = None
    ) -> AsyncIterator[UnreadResponse]:
        """Request the content from ``start`` to before ``end``; the defaults request all of it.

        Args:
            validator: if the content no longer matches it, the server sends everything, not the range.

        Raises:
            Interrupted: the server could not be reached, or cannot answer now.
            DownloadError: it refused, or redirects too often.
            DownloadRefusedError: the URL or an address is not acceptable.
        """
        url, headers = checked_url(self.url)[0], self._headers | _range_headers(start, end, validator)
        cookies = Cookies()
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._request(url, cookies.added_to(headers, url)) as response:
                location = _raw_header(response, b"location")
                if response.status not in _REDIRECTS or location is None:
                    yield _answer(url, response)
                    return
                cookies.store(url, response.headers)
            target, login = redirected(url, location)
            headers = headers_after(url, target, headers, login)
            url = target
        raise DownloadError(f"{url}: more than {_MAX_REDIRECTS} redirects")

    @asynccontextmanager
    async def _request(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[httpcore.Response]:
        lines = {
            "Host": urllib.parse.urlsplit(url).netloc,
            "User-Agent": "nekro-workers",
            "Accept": "*/*",
            # Sizes, digests and resuming refer to the stored bytes, not to a compressed transfer.
            "Accept-Encoding": "identity",
            **headers,
        }
        opened = self._pool.stream(
            "GET", url, headers=list(lines.items()), extensions={"timeout": self._timeouts}
        )
        try:
            response = await opened.__aenter__()
        except _BROKEN as exc:
            raise Interrupted(f"{url} cannot be fetched: {_reason(exc)}") from exc
        except DownloadRefusedError:
            raise
        except DownloadError as exc:  # connection error: the name does not resolve, or nothing listens there
            raise Interrupted(str(exc)) from exc
        try:
            yield response
        finally:
            await opened.__aexit__(None, None, None)


def _range_headers(start: int, end: int | None, validator: str | None) -> dict[str, str]:
    if start == 0 and end is None:
        return {}
    headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
    return headers if validator is None else headers | {"If-Range": validator}


def _answer(url: str, response: httpcore.Response) -> UnreadResponse:
    if response.status in _PASSING:
        pause = stated_pause(_header(response, b"retry-after"), now=_header(response, b"date"))
        raise Interrupted(f"{url} answered {response.status}", status=response.status, pause_seconds=pause)
    if response.status not in (200, 206, 416):
        raise DownloadError(f"{url} answered {response.status}")
    start, whole = 0, _number(_header(response, b"content-length"))
    end = whole
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch(_header(response, b"content-range") or "")
        if match is None:
            raise DownloadError(f"{url} sends a part without a valid Content-Range header")
        start, end, whole = int(match[1]), int(match[2]) + 1, _number(match[3])
    encoding = encoding_of(_header(response, b"content-encoding"), url=url)
    if encoding is not None:  # sizes, ranges and validators are those of the encoded form
        end = whole = None
    offered = _header(response, b"accept-ranges")
    return UnreadResponse(
        url=url,
        status=response.status,
        start=start,
        end=end,
        whole_bytes=whole,
        validator=None if encoding else _validator(response),
        accepts_ranges=True if response.status == 206 else None if offered is None else offered == "bytes",
        content_type=_header(response, b"content-type"),
        disposition=_raw_header(response, b"content-disposition"),
        encoding=encoding,
        response=response,
    )


def _validator(response: httpcore.Response) -> str | None:
    etag = _header(response, b"etag")
    if etag is not None and not etag.startswith("W/"):
        return etag
    return _header(response, b"last-modified")


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    return int(text)


def _header(response: httpcore.Response, name: bytes) -> str | None:
    value = _raw_header(response, name)
    return None if value is None else value.decode("latin-1")


def _raw_header(response: httpcore.Response, name: bytes) -> bytes | None:
    return next((bytes(value) for key, value in response.headers if key.lower() == name), None)


def _reason(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
