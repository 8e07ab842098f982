"""Downloads: streamed to disk, limited, and never to an address that plugins must not reach."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpcore

from nekro_agent import runtime
from nekro_agent.errors import DownloadError, DownloadRefusedError, InvalidValueError
from nekro_agent.policies import DownloadPolicy
from nekro_agent.tools.addresses import AddressPolicy, CheckedBackend

__all__ = ["Download", "Progress", "fetch"]

_MAX_REDIRECTS: Final = 10
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_WRITE_BYTES: Final = 1 << 20
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
#: Headers that must not follow a redirect to another host.
_PRIVATE_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization"})

#: Called with the bytes received so far and the whole size, None while it is unknown.
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, kw_only=True)
class Download:
    """A finished download."""

    path: Path
    size_bytes: int
    sha256: str
    content_type: str | None
    #: Where the content came from, after redirects.
    url: str


async def fetch(
    url: str,
    dest: Path | str,
    *,
    sha256: str | None = None,
    max_bytes: int | None = None,
    timeout_seconds: float | None = None,
    allow_private: Iterable[str] | None = None,
    headers: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Download:
    """Fetch ``url`` into the file ``dest``, which appears complete or not at all.

    Args:
        dest: a file path; its directory is created, a file there is replaced at the end.
        sha256: expected digest in hexadecimal; None accepts any content.
        max_bytes: largest content; None means the configured limit, which it can only lower.
        timeout_seconds: longest silence of the server; None means the configured one.
        allow_private: hosts and networks that may be reached although private; None means
            the configured ones.

    Raises:
        DownloadRefusedError: scheme, address, size or digest is not acceptable.
        DownloadError: the server could not be reached, refused, or broke off.
        InvalidValueError: ``dest`` is a directory or ``sha256`` is no digest.
    """
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise InvalidValueError(f"sha256={sha256!r} is not a digest of 64 hexadecimal digits")
    target = _checked_target(dest)
    policy = runtime.current().downloads if runtime.is_bound() else DownloadPolicy()
    limit = policy.max_bytes if max_bytes is None else min(max_bytes, policy.max_bytes)
    silence = timeout_seconds or policy.timeout_seconds
    admitted = AddressPolicy(policy.allow_private if allow_private is None else allow_private)
    async with (
        httpcore.AsyncConnectionPool(network_backend=CheckedBackend(admitted)) as pool,
        _open_url(pool, url, silence, dict(headers or {})) as (final_url, response),
    ):
        whole = _announced_size(response)
        if whole is not None and whole > limit:
            raise DownloadRefusedError(f"{final_url} has {whole} bytes, the limit is {limit}")
        with _PartFile(target) as part:
            await _receive(response, part, limit, whole, progress, final_url)
            part.finish(sha256, final_url)
        return Download(
            path=target,
            size_bytes=part.size_bytes,
            sha256=part.hexdigest(),
            content_type=_header(response, b"content-type"),
            url=final_url,
        )


def _checked_target(dest: Path | str) -> Path:
    target = Path(dest).absolute()
    if target.is_dir():
        raise InvalidValueError(f"download target {target.name!r} is a directory; name a file in it")
    return target


class _PartFile:
    """A temporary file beside the target, renamed over it when complete and removed otherwise."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.part")
        self._hash = hashlib.sha256()
        self.size_bytes = 0

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        except OSError as exc:
            raise DownloadError(f"cannot write {target.name!r}: {exc.strerror}") from exc

    def __enter__(self) -> _PartFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append; blocking, meant for a thread."""
        try:
            self._file.write(data)
        except OSError as exc:
            raise DownloadError(f"cannot write {self._target.name!r}: {exc.strerror}") from exc
        self._hash.update(data)
        self.size_bytes += len(data)

    def hexdigest(self) -> str:
        """SHA-256 of what was written."""
        return self._hash.hexdigest()

    def finish(self, sha256: str | None, url: str) -> None:
        """Check the digest and move the file to its final name."""
        if sha256 is not None and self.hexdigest() != sha256.lower():
            raise DownloadRefusedError(
                f"{url}: content has SHA-256 {self.hexdigest()}, expected {sha256.lower()}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.replace(self._target)


async def _receive(
    response: httpcore.Response,
    part: _PartFile,
    limit: int,
    whole: int | None,
    progress: Progress | None,
    url: str,
) -> None:
    """Stream the body to disk in large pieces; writing and hashing happen off the event loop."""
    buffer = bytearray()
    try:
        async for chunk in response.aiter_stream():
            buffer += chunk
            if part.size_bytes + len(buffer) > limit:
                raise DownloadRefusedError(f"{url} sends more than the limit of {limit} bytes")
            if len(buffer) >= _WRITE_BYTES:
                await asyncio.to_thread(part.write, bytes(buffer))
                buffer.clear()
                if progress is not None:
                    progress(part.size_bytes, whole)
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as exc:
        raise DownloadError(
            f"{url} broke off after {part.size_bytes + len(buffer)} bytes: {_reason(exc)}"
        ) from exc
    await asyncio.to_thread(part.write, bytes(buffer))
    if progress is not None:
        progress(part.size_bytes, whole)


@asynccontextmanager
async def _open_url(
    pool: httpcore.AsyncConnectionPool, url: str, silence: float, headers: dict[str, str]
) -> AsyncIterator[tuple[str, httpcore.Response]]:
    """Follow redirects, each checked like the first URL, and yield the final response."""
    timeouts = {"connect": silence, "read": silence, "write": silence, "pool": silence}
    for _ in range(_MAX_REDIRECTS + 1):
        url, host = _checked_url(url)
        request_headers = {
            "Host": urllib.parse.urlsplit(url).netloc,
            "User-Agent": "nekro-workers",
            "Accept": "*/*",
            # Sizes, digests and resuming speak of the stored bytes, not of a compressed transfer.
            "Accept-Encoding": "identity",
            **headers,
        }
        try:
            async with pool.stream(
                "GET", url, headers=list(request_headers.items()), extensions={"timeout": timeouts}
            ) as response:
                location = _header(response, b"location")
                if response.status not in _REDIRECTS or location is None:
                    if response.status != 200:
                        raise DownloadError(f"{url} answered {response.status}")
                    yield url, response
                    return
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as exc:
            raise DownloadError(f"{url} cannot be fetched: {_reason(exc)}") from exc
        url = urllib.parse.urljoin(url, location)
        if _checked_url(url)[1] != host:
            headers = {k: v for k, v in headers.items() if k.lower() not in _PRIVATE_HEADERS}
    raise DownloadError(f"{url}: more than {_MAX_REDIRECTS} redirects")


def _checked_url(url: str) -> tuple[str, str]:
    """Return a URL that may be fetched at all, in ASCII, and its host."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = (parts.hostname or "").encode("ascii" if ":" in (parts.hostname or "") else "idna").decode()
    except ValueError as exc:
        raise DownloadRefusedError(f"{url!r} is not a URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise DownloadRefusedError(f"{url!r} is no http:// or https:// URL")
    bracketed = f"[{host}]" if ":" in host else host
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    return urllib.parse.urlunsplit((parts.scheme, bracketed + port, path, query, "")), host


def _announced_size(response: httpcore.Response) -> int | None:
    text = _header(response, b"content-length")
    return int(text) if text is not None and text.isdigit() else None


def _header(response: httpcore.Response, name: bytes) -> str | None:
    for key, value in response.headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return None


def _reason(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
