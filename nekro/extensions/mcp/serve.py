"""The system as an MCP server on the standard streams: of this host, or relayed to `/mcp` of a gateway.

Messages are lines of JSON, and nothing else goes to stdout. The relay passes them on as they are.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import httpx

from nekro.base.tasks import end_tasks
from nekro_agent.errors import ServiceError, UsageError
from nekro_client.answer_limits import limited
from nekro_client.operations import connection_options
from nekro_client.sse import EventParser, EventTooLargeError
from nekro_client.streams import STREAM_TIMEOUT

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.cli.output import Output
    from nekro.extensions.mcp.server.callers import Caller
    from nekro_client.models import Run

__all__ = [
    "HostStreams",
    "host_streams",
    "relay",
    "serve",
]


#: Most bytes of a message of the host.
_MOST_BYTES: Final = 32 << 20

_PARSE_ERROR: Final = -32700


class HostStreams:
    """Messages of the host that started this process, and messages to it; made by ``host_streams``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read and write lines."""
        self._reader, self._writer = reader, writer

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield lines that are JSON until the host closes the stream; others are answered with an error."""
        while (line := await self._line()) is not None:
            fault = _fault(line)
            if fault is None:
                yield line.decode()
            elif line.strip():
                await self.fail(None, _PARSE_ERROR, fault)

    async def write(self, text: str) -> None:
        """Write text, which ``flush`` sends."""
        self._writer.write(text.encode())

    async def flush(self) -> None:
        """Wait until the host takes what was written; a host that has left ends the messages."""
        try:
            await self._writer.drain()
        except ConnectionError:
            self._reader.feed_eof()

    async def fail(self, request_id: object, code: int, text: str) -> None:
        """Write an error as the answer to a request; None: a message that has no readable id."""
        error = {"code": code, "message": text}
        await self.write(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}) + "\n")
        await self.flush()

    async def _line(self) -> bytes | None:
        """Return the next line, cut if it is too long; None at the end."""
        cut = b""
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
                return cut or line
            except asyncio.LimitOverrunError as exc:
                part = await self._reader.readexactly(exc.consumed)
                cut = cut or part
            except asyncio.IncompleteReadError as exc:
                return cut or exc.partial or None


@asynccontextmanager
async def host_streams() -> AsyncIterator[HostStreams]:
    """Open the streams; in the block stdin is empty and stdout is stderr for everything else in the process.

    Raises:
        UsageError: stdin or stdout is a file.
    """
    with _diverted() as (incoming, outgoing):
        try:
            reader, reading = await _reader(incoming)
            writer = await _writer(outgoing)
        except ValueError as exc:
            detail = (
                "stdin and stdout must be pipes: an MCP host starts this command and writes messages to it"
            )
            raise UsageError(detail) from exc
        try:
            yield HostStreams(reader, writer)
        finally:
            reading.close()
            writer.transport.abort()


@contextmanager
def _diverted() -> Iterator[tuple[int, int]]:
    """Yield descriptors of stdin and stdout; child processes inherit the null device and stderr instead."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield incoming, outgoing
    finally:
        os.dup2(incoming, 0)
        os.dup2(outgoing, 1)
        for descriptor in (nothing, incoming, outgoing):
            os.close(descriptor)


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MOST_BYTES)
    # A transport closes its file, and ``_diverted`` needs its descriptors until the end.
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb")
    )
    return reader, transport


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport: Any
    transport, _ = await loop.connect_write_pipe(lambda: protocol, os.fdopen(os.dup(descriptor), "wb"))
    return asyncio.StreamWriter(transport, protocol, None, loop)


def _fault(line: bytes) -> str | None:
    """Return why a line is not a message; None if it is JSON."""
    if len(line) >= _MOST_BYTES:
        return f"a message has at most {_MOST_BYTES} bytes"
    try:
        json.loads(line)
    except (ValueError, RecursionError) as exc:
        return f"a line of stdin is no JSON: {str(exc)[:200]}"
    return None


#: Chat of a host that names none; that of a gateway without keys too.
_CHAT_KEY: Final = "mcp-local"


async def serve(settings: Settings, *, chat_key: str | None, user_id: str | None, output: Output) -> None:
    """Serve the host until it closes stdin, with every right but that to approve calls.

    Args:
        chat_key: where calls and code run; None: a chat of its own.
        user_id: on whose behalf; None: no user.

    Raises:
        ServiceError: there is no SDK.
        The errors of ``open_services`` and ``host_streams``.
    """
    try:
        from mcp.server.stdio import stdio_server

        from nekro.extensions.mcp.server.server import FleetMcpServer
    except ImportError as exc:
        raise ServiceError("there is no MCP SDK; install it with `pip install 'nekro-workers[mcp]'`") from exc
    from nekro.cli.services.system import CALL_LANES, open_services
    from nekro.extensions.mcp.server.callers import Caller
    from nekro.gateway.streams.hub import EventHub
    from nekro.operations.actor import LOCAL, Actor

    async with (
        host_streams() as host,
        open_services(settings, command="mcp", lanes=CALL_LANES, output=output) as (_, services),
    ):
        actor = Actor(services=services, identity=LOCAL)
        caller = Caller(actor=actor, chat_key=chat_key or _CHAT_KEY, user_id=user_id)
        hub = EventHub(services.settings, services.database, publisher=services.publisher)
        hub.start()
        server = FleetMcpServer(services, hub, lambda _: caller, run=_run)
        # The SDK's own reader waits in a thread, which would keep a process alive that is to end.
        streams: Any = host
        try:
            async with stdio_server(stdin=streams, stdout=streams) as (incoming, outgoing):
                await server.sdk.run(incoming, outgoing, server.sdk.create_initialization_options())
        finally:
            server.changes.close()
            await hub.close()


async def _run(caller: Caller, code: str, run_id: str) -> Run:
    from nekro.app import use_cases
    from nekro.operations.calls import run_answer

    report = await use_cases.run_code(
        caller.actor.services,
        code,
        chat_key=caller.chat_key,
        user_id=caller.user_id,
        follow_up=False,
        file_name="<mcp>",
    )
    return run_answer(run_id, report)


_SESSION: Final = "mcp-session-id"

_VERSION: Final = "mcp-protocol-version"
#: Key of the protocol's version in each request, from 2026-07-28 on.
_VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
#: Parameters whose values a header repeats.
_NAMES: Final = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}

_PLAIN: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")

_INTERNAL_ERROR: Final = -32603
#: Attempts to connect, with growing pauses: a gateway may be starting again.
_CONNECTS: Final = 4


async def relay(*, chat_key: str | None, user_id: str | None) -> None:
    """Relay between the host and the gateway of ``NEKRO_URL`` until the host closes stdin.

    Args:
        chat_key: where calls and code run; None: the key's chat.
        user_id: on whose behalf; None: the key's user.

    Raises:
        ClientError: ``NEKRO_URL`` is no URL.
        UsageError: as from ``host_streams``.
    """
    url, headers, auth = connection_options(None, None)
    stated = {"x-nekro-chat": chat_key, "x-nekro-user": user_id}
    headers |= {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        **{name: value for name, value in stated.items() if value is not None},
    }
    transport = httpx.AsyncHTTPTransport(retries=_CONNECTS)
    async with (
        host_streams() as host,
        httpx.AsyncClient(
            headers=headers,
            auth=auth,
            timeout=STREAM_TIMEOUT,
            transport=transport,
            trust_env=auth is None,
            event_hooks=limited(),
        ) as http,
    ):
        await _Relay(host, http, f"{url}/mcp").run()


class _Relay:
    """The exchange of one host."""

    def __init__(self, host: HostStreams, http: httpx.AsyncClient, url: str) -> None:
        self._host, self._http, self._url = host, http, url
        #: What the handshake of older versions agreed on: session and version.
        self._agreed: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Relay until the host has closed its stream; requests that still run are abandoned."""
        try:
            async for line in self._host:
                await self._take(line)
        finally:
            await end_tasks(*self._running.values())

    async def _take(self, line: str) -> None:
        message = json.loads(line)
        if not isinstance(message, dict) or "id" not in message or "method" not in message:
            await self._notify(line, message if isinstance(message, dict) else {})
            return
        key = json.dumps(message["id"])
        task = asyncio.create_task(self._request(line, message), name="nekro-mcp-relay")
        self._running[key] = task
        task.add_done_callback(lambda done: self._forget(key, done))
        if message["method"] == "initialize":
            await asyncio.wait([task])  # what follows belongs to the session that it begins

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        if self._running.get(key) is task:
            del self._running[key]

    async def _notify(self, line: str, message: Mapping[str, Any]) -> None:
        if message.get("method") == "notifications/cancelled" and not self._agreed:
            # From 2026-07-28 on, closing the answer is what cancels a request.
            params = message.get("params")
            request_id = params.get("requestId") if isinstance(params, dict) else None
            task = self._running.get(json.dumps(request_id))
            if task is not None:
                task.cancel()
            return
        with suppress(httpx.HTTPError):  # the host waits for no answer
            await self._http.post(self._url, content=line, headers=self._headers(message))

    async def _request(self, line: str, message: Mapping[str, Any]) -> None:
        try:
            sending = self._http.stream("POST", self._url, content=line, headers=self._headers(message))
            async with sending as response:
                is_answered = await self._answer(response, message)
            if not is_answered:
                await self._fail(message, "the gateway ended the answer too soon; send the request again")
        except (httpx.HTTPError, EventTooLargeError) as exc:
            await self._fail(message, f"{self._url} does not answer: {str(exc) or type(exc).__name__}")

    async def _answer(self, response: httpx.Response, message: Mapping[str, Any]) -> bool:
        """Write the answer, and what is reported before it; returns whether there was one."""
        if "text/event-stream" not in response.headers.get("content-type", ""):
            await self._write_body(response, message, (await response.aread()).decode(errors="replace"))
            return True
        parser, is_answered = EventParser(), False
        async for chunk in response.aiter_bytes():
            for event in parser.feed(chunk):
                if event.data:
                    is_answered |= await self._write(response, message, event.data)
        return is_answered

    async def _write_body(self, response: httpx.Response, message: Mapping[str, Any], text: str) -> None:
        found = _object(text)
        if "jsonrpc" not in found:
            detail = found.get("detail") or f"{self._url} answered {response.status_code}"
            await self._fail(message, str(detail))
        elif "error" in found and found.get("id") is None:
            # Refused before its id was read.
            await self._write(response, message, json.dumps({**found, "id": message["id"]}))
        else:
            await self._write(response, message, text)

    async def _write(self, response: httpx.Response, message: Mapping[str, Any], text: str) -> bool:
        """Write a message of the gateway; returns whether it answers the request."""
        found = _object(text)
        result = found.get("result")
        if message["method"] == "initialize" and isinstance(result, dict):
            self._agreed = {_VERSION: str(result.get("protocolVersion"))}
            if _SESSION in response.headers:
                self._agreed[_SESSION] = response.headers[_SESSION]
        # One line: JSON has no line breaks besides those between its tokens.
        await self._host.write(text.replace("\r", "").replace("\n", " ") + "\n")
        await self._host.flush()
        return "result" in found or "error" in found

    async def _fail(self, message: Mapping[str, Any], text: str) -> None:
        await self._host.fail(message["id"], _INTERNAL_ERROR, text)

    def _headers(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that repeat parts of a message."""
        method = message.get("method")
        if method == "initialize":
            return {}
        params = message.get("params")
        meta = params.get("_meta") if isinstance(params, dict) else None
        version = meta.get(_VERSION_KEY) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            return self._agreed
        headers = {_VERSION: _header(version), "mcp-method": _header(str(method))}
        name = params.get(_NAMES.get(str(method), "")) if isinstance(params, dict) else None
        return headers | ({"mcp-name": _header(name)} if isinstance(name, str) else {})


def _header(text: str) -> str:
    """Return a value as a header has it: in base64 if it is not plain."""
    if _PLAIN.fullmatch(text) and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8', 'backslashreplace')).decode()}?="


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
