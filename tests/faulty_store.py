"""An HTTP proxy in front of a server of S3 that fails as stores do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from stream_server import StreamServer

#: Decides by method and path whether a fault applies to a request.
Applies = Callable[[str, str], bool]


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    raw: bytes

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.target


def _never(_method: str, _target: str) -> bool:
    return False


@dataclass
class Faults:
    """What the proxy does instead of passing a request on; each applies to the requests that it names."""

    #: Answer 503 without passing it on.
    refuses: Applies = _never
    #: Pass it on, and close the connection without an answer.
    loses_answer: Applies = _never
    #: Pass it on twice, and return the second answer.
    repeats: Applies = _never
    #: Pass it on, and close the connection in the middle of the answer.
    cuts: Applies = _never
    #: Never answer.
    hangs: Applies = _never
    #: Return the answer of the first listing for all later ones.
    lists_old: bool = False
    #: How often each request was refused or lost.
    counts: Counter[str] = field(default_factory=Counter)


class FaultyStore:
    """A proxy; ``faults`` may change at any time. It serves one request per connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.faults = Faults()
        #: Requests that were passed on, by method.
        self.passed: Counter[str] = Counter()
        #: Called with each request before anything else happens.
        self.on_request: Callable[[Request], None] = lambda _request: None
        self._listing: bytes | None = None
        self._server = StreamServer(self._serve)

    @property
    def port(self) -> int:
        return self._server.port

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__(*error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            answer = await self._answer(await _read_request(reader))
            if answer is not None:
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def _answer(self, request: Request) -> bytes | None:
        self.on_request(request)
        faults, of = self.faults, (request.method, request.target)
        if faults.hangs(*of):
            await asyncio.Event().wait()
        if faults.refuses(*of):
            faults.counts[request.method] += 1
            return b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        if faults.lists_old and request.is_listing and self._listing is not None:
            return self._listing
        answer = await self._pass_on(request)
        if faults.repeats(*of):
            answer = await self._pass_on(request)
        if request.is_listing and self._listing is None:
            self._listing = answer
        if faults.loses_answer(*of):
            faults.counts[request.method] += 1
            return None
        if faults.cuts(*of):
            faults.counts[request.method] += 1
            return answer[: len(answer) // 2]
        return answer

    async def _pass_on(self, request: Request) -> bytes:
        self.passed[request.method] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            writer.write(request.raw)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    method, target, _ = first.decode().split(" ")
    raw = b"\r\n".join([first, *kept, b"Connection: close", b"", body])
    return Request(method, target, raw)
