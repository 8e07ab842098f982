"""The requests of the API and the files that they send in pieces, independent of how they are sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import mimetypes
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePath
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from nekro_client.errors import ApiError, ClientError, InvalidAnswerError, UnreachableError, api_error
from nekro_client.local_key import LocalKeyAuth, is_on_this_host
from nekro_client.models import Problem

__all__ = [
    "API",
    "CHUNK_BYTES",
    "CONNECT_SECONDS",
    "RETRY_SECONDS",
    "Backoff",
    "Delay",
    "Operation",
    "Upload",
    "connecting",
    "connection_options",
    "failure_of",
    "is_passing",
    "operation",
    "parsed_json",
    "segment",
    "tls_of",
    "unreachable",
]


CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file of this host, or bytes, as the content of a message or of an upload."""

    name: str
    media_type: str
    size_bytes: int
    source: Path | bytes

    @classmethod
    def of(cls, source: Path | str | bytes, *, name: str | None, media_type: str | None) -> Upload:
        """Describe a path, or bytes with a name.

        Raises:
            ValueError: bytes have no name.
            OSError: the file cannot be read.
        """
        if isinstance(source, bytes):
            if not name:
                raise ValueError("bytes need a name: pass name=")
            size = len(source)
        else:
            source = Path(source)
            name, size = name or source.name, source.stat().st_size
        guessed = media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
        return cls(name=name, media_type=guessed, size_bytes=size, source=source)

    def with_digest(self) -> Upload:
        """Return the same content under a name with its digest, so that the same file has the same name."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        name = PurePath(self.name)
        return replace(self, name=f"{name.stem}-{digest.hexdigest()[:12]}{name.suffix}")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request that uploads it."""
        return {"content-type": self.media_type, "content-length": str(self.size_bytes)}

    def chunks(self) -> Generator[bytes, None, None]:
        """Yield the content; a new iteration begins at its start."""
        if isinstance(self.source, bytes):
            for start in range(0, len(self.source), CHUNK_BYTES):
                yield self.source[start : start + CHUNK_BYTES]
            return
        with self.source.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    async def achunks(self) -> AsyncIterator[bytes]:
        """Yield what ``chunks`` yields; the file is read on threads."""
        chunks = self.chunks()
        try:
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield chunk
        finally:
            chunks.close()


T = TypeVar("T")

API: Final = "/api/v1"
#: 2: the client knows that a turn may wait for a person after its rounds. Without a number: it does not.
_AGENT: Final = "nekro-client/2"
#: Time limit of connecting, also for streams.
CONNECT_SECONDS: Final = 10.0
#: A method's call may answer nothing for this long; the time of ``wait`` comes on top.
READ_SECONDS: Final = 60.0
#: How long requests that fail in passing are repeated: longer than a gateway takes to start again.
RETRY_SECONDS: Final = 30.0
#: First delay before a request is sent, or a stream connects, again; each further one is twice as long.
_FIRST_DELAY_SECONDS: Final = 0.1
#: Longest delay: a gateway that is back is found this late at most.
_LONGEST_DELAY_SECONDS: Final = 5.0
#: Statuses of proxies whose gateway is restarting.
_PROXY_STATUSES: Final = frozenset({502, 503, 504})
#: Problems that pass by themselves. The request had no effect, or its key makes it happen only once.
_PASSING_CODES: Final = frozenset({"idempotent_request_running"})


@dataclass(frozen=True, kw_only=True)
class Operation(Generic[T]):
    """One request and how its answer is read."""

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    #: Content that is sent in pieces, instead of ``content``.
    upload: Upload | None = None
    #: How long the gateway may hold the request on purpose, in seconds.
    wait_seconds: float = 0

    @property
    def timeout(self) -> httpx.Timeout:
        """Limits of the request."""
        return httpx.Timeout(READ_SECONDS + self.wait_seconds, connect=CONNECT_SECONDS)

    def after(self, cursor: str) -> Operation[T]:
        """Return the request of a list's next page."""
        return replace(self, params={**self.params, "cursor": cursor})


def operation(
    method: str,
    path: str,
    kind: type[T] | Any,
    *,
    params: Mapping[str, object] | None = None,
    body: BaseModel | Mapping[str, object] | None = None,
    idempotency_key: str | None = None,
    wait_seconds: float = 0,
    upload: Upload | None = None,
) -> Operation[T]:
    """Return a request with a JSON body whose answer is JSON.

    Args:
        kind: type of the answer; ``None`` for an answer whose body is not read.
        params: of the query; None values are left out.
        idempotency_key: of a POST; None makes one, so that repeating the request is safe.
    """
    headers = {"accept": "application/json"}
    content = None
    if body is not None:
        plain = body.model_dump(mode="json", exclude_none=True) if isinstance(body, BaseModel) else body
        content = _json_bytes(plain)
        headers["content-type"] = "application/json"
    if upload is not None:
        headers |= upload.headers
    if method == "POST":
        headers["idempotency-key"] = idempotency_key or uuid4().hex
    return Operation(
        method=method,
        path=f"{API}{path}",
        params={name: _query(value) for name, value in (params or {}).items() if value is not None},
        headers=headers,
        content=content,
        upload=upload,
        wait_seconds=wait_seconds,
        parse=_parser(kind),
    )


def parsed_json(
    text: bytes | str, validate_json: Callable[[bytes | str], T], validate: Callable[[Any], T]
) -> T:
    """Return what a JSON text describes; it may contain lone surrogates, as a chat may.

    Args:
        validate_json: pydantic's method for JSON, which is fast.
        validate: its method for parsed values; its own parser refuses lone surrogates.

    Raises:
        ValidationError: the text is no JSON, or describes something else.
    """
    try:
        return validate_json(text)
    except ValidationError:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if value is None:
            raise
        return validate(value)


def unreachable(path: str, cause: httpx.RequestError) -> UnreachableError:
    """Return the error of a request that got no whole answer."""
    return UnreachableError(f"no answer for {path}: {cause or type(cause).__name__}")


def segment(text: str) -> str:
    """Return an id or a key as one segment of a path.

    Raises:
        ValueError: no URL can have it as a segment.
    """
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} cannot be an id or a chat key")
    return quote(text, safe="")


def connection_options(url: str | None, key: str | None) -> tuple[str, dict[str, str], httpx.Auth | None]:
    """Return base URL, headers and what adds the key of a gateway on this host.

    What is None comes from ``NEKRO_URL`` and ``NEKRO_KEY``. If neither states a key, a request to this host
    has that of `nekro up`.

    Raises:
        ClientError: there is no URL, or it is not one of HTTP.
    """
    url = url or os.environ.get("NEKRO_URL") or ""
    parsed = httpx.URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientError(f"the URL of the gateway is {url!r}; pass url= or set NEKRO_URL=https://host")
    key = key if key is not None else os.environ.get("NEKRO_KEY") or None
    headers = {"user-agent": _AGENT}
    if key:
        headers["authorization"] = f"Bearer {key.strip()}"
    auth = LocalKeyAuth() if key is None and is_on_this_host(parsed) else None
    return url.rstrip("/").removesuffix(API), headers, auth


def tls_of(base: str, auth: httpx.Auth | None) -> ssl.SSLContext | bool:
    """Return how ``httpx`` verifies servers; True: by the authorities that it knows.

    Reading these takes 20 ms of a command. Without TLS, and without a proxy of the environment, a client
    needs none: then the context has no authority, and accepts no certificate.
    """
    if auth is None or not base.startswith("http:"):
        return True
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def failure_of(response: httpx.Response) -> ApiError | None:
    """Return the error that a response is; None for a success. Its body must have been read."""
    if response.is_success:
        return None
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        phrase = response.reason_phrase or f"status {response.status_code}"
        problem = Problem(
            title=phrase,
            status=response.status_code,
            detail=f"{response.request.method} {response.request.url.path}: {phrase}",
            code="no_problem_document",
            request_id=response.headers.get("x-request-id"),
        )
    return api_error(problem, retry_after_seconds=_retry_after(response))


class Delay:
    """Delays between attempts that fail one after the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again with the first delay."""
        self._next = _FIRST_DELAY_SECONDS

    def take(self) -> float:
        """Return the seconds to wait before the next attempt; the delay after it is longer."""
        self._next, delay = min(self._next * 2, _LONGEST_DELAY_SECONDS), self._next
        return delay


class Backoff:
    """Decides whether and when a request that failed is sent again; one per request.

    Every request may be repeated: GET, PUT and DELETE by their meaning, POST by its idempotency key.
    """

    def __init__(self, seconds: float) -> None:
        """Allow repetitions for so many seconds from now."""
        self._end = time.monotonic() + seconds
        self._delay = Delay()

    def delay_after(self, error: ClientError) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is none."""
        if not is_passing(error):
            return None
        stated = error.retry_after_seconds if isinstance(error, ApiError) else None
        delay = max(self._delay.take(), stated or 0.0)
        return delay if time.monotonic() + delay < self._end else None


def is_passing(error: ClientError) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, UnreachableError):
        return True
    if not isinstance(error, ApiError):
        return False
    if error.code == "no_problem_document":
        return error.status in _PROXY_STATUSES
    return error.status in (429, 503) or error.code in _PASSING_CODES


def _json_bytes(value: object) -> bytes:
    """Return a value as JSON in UTF-8; lone surrogates, which that lacks, become JSON's escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def _parser(kind: Any) -> Callable[[httpx.Response], Any]:
    if kind is None:
        return lambda response: None
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def parse(response: httpx.Response) -> Any:
        try:
            return parsed_json(response.content, adapter.validate_json, adapter.validate_python)
        except ValidationError as exc:
            raise InvalidAnswerError(f"{response.url.path} returned an invalid response: {exc}") from exc

    return parse


def _query(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, (at.astimezone(UTC) - datetime.now(UTC)).total_seconds())


@contextmanager
def connecting(path: str) -> Iterator[None]:
    """Translate errors of httpx for a request of ``path``."""
    try:
        yield
    except httpx.RequestError as exc:
        raise unreachable(path, exc) from exc
