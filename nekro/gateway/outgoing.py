"""Requests of the gateway to addresses that others chose: public addresses only, without redirects."""

from __future__ import annotations

import asyncio
import functools
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpcore

from nekro_agent.downloads.addresses import AddressPolicy, checked_url
from nekro_agent.downloads.socket import CheckedBackend
from nekro_agent.errors import DownloadError

__all__ = ["OutgoingHttp", "RequestFailedError", "trusted_certificates"]

_MOST_CONNECTIONS: Final = 64
_MOST_ANSWER_BYTES: Final = 64 << 10


@functools.cache
def trusted_certificates() -> ssl.SSLContext:
    """The certificates that this host trusts; each time they are loaded takes as long as many requests."""
    return ssl.create_default_context()


class RequestFailedError(Exception):
    """The other side could not be reached, did not answer in time, or its address is refused."""


class OutgoingHttp:
    """A pool of connections; the address of each is checked when it is opened, and it stays on it."""

    def __init__(self, policy: AddressPolicy) -> None:
        """Create it, for the addresses that the policy allows; ``close`` it."""
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=trusted_certificates(),
            max_connections=_MOST_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=CheckedBackend(policy),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    async def post(self, url: str, *, headers: dict[str, str], content: bytes, seconds: float) -> int:
        """Return the status of the answer; nothing else of it is used.

        Raises:
            RequestFailedError: as its name says.
        """
        async with _limited(url, seconds):
            status, _ = await self._request("POST", url, headers, content, most_bytes=_MOST_ANSWER_BYTES)
        return status

    async def get(self, url: str, *, most_bytes: int, seconds: float) -> bytes:
        """Return the content of a URL.

        Raises:
            RequestFailedError: as its name says; also for a status other than 200, or more bytes.
        """
        async with _limited(url, seconds):
            status, content = await self._request("GET", url, {}, None, most_bytes=most_bytes + 1)
        if status != 200 or len(content) > most_bytes:
            raise RequestFailedError(f"{_host_of(url)}: status {status}, at least {len(content)} bytes")
        return content

    async def _request(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None, *, most_bytes: int
    ) -> tuple[int, bytes]:
        url, _ = checked_url(url)
        lines = {"Host": urllib.parse.urlsplit(url).netloc, "User-Agent": "nekro-workers", **headers}
        if content is not None:
            lines["Content-Length"] = str(len(content))
        async with self._pool.stream(method, url, headers=list(lines.items()), content=content) as answer:
            received = bytearray()
            async for chunk in answer.aiter_stream():
                received += chunk
                if len(received) >= most_bytes:
                    break
            return answer.status, bytes(received)


@asynccontextmanager
async def _limited(url: str, seconds: float) -> AsyncIterator[None]:
    """Limit the time of a request, and translate its errors, whose texts are logged and stored."""
    host = _host_of(url)
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RequestFailedError(f"{host}: no answer within {seconds:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as exc:
        raise RequestFailedError(f"{host}: {exc or type(exc).__name__}") from exc
    except DownloadError as exc:  # of the check of addresses
        raise RequestFailedError(str(exc)) from exc


def _host_of(url: str) -> str:
    """Return the host of a URL; the rest may contain a secret."""
    return urllib.parse.urlsplit(url).hostname or "the URL"
