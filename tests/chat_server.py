"""A real HTTP server with the OpenAI chat protocol whose behaviour tests choose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from stream_server import StreamServer
from waiting import WAIT_SECONDS


@dataclass(frozen=True)
class SeenRequest:
    """One received request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    reader: asyncio.StreamReader


Behaviour = Callable[[asyncio.StreamWriter, SeenRequest], Awaitable[None]]


@dataclass
class ChatServer:
    """Answers the n-th request with the n-th behaviour, and further ones with the last."""

    behaviours: list[Behaviour]
    seen: list[SeenRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = StreamServer(self._serve)

    async def __aenter__(self) -> ChatServer:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read(reader)
            self.seen.append(request)
            await self.behaviours[min(len(self.seen), len(self.behaviours)) - 1](writer, request)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> SeenRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    path = head[0].split(" ")[1]
    return SeenRequest(path=path, headers=headers, body=json.loads(body) if body else {}, reader=reader)


@dataclass
class SceneServer:
    """A chat server in a thread: the newest ``scene:<name>`` in a prompt chooses its behaviour.

    Of a list the n-th request of that scene gets the n-th behaviour, and further ones the last.
    """

    scenes: dict[str, list[Behaviour]]
    #: The requests by scene.
    asked: dict[str, list[SeenRequest]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server = ChatServer([self._behave])
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> str:
        """Start to serve; returns the base URL."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.__aenter__(), self._loop).result(WAIT_SECONDS)
        return self._server.base_url

    def stop(self) -> None:
        """Stop."""
        asyncio.run_coroutine_threadsafe(self._server.__aexit__(), self._loop).result(WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _behave(self, writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        texts = [message["content"] for message in request.body["messages"] if message["role"] == "user"]
        scene = re.findall(r"scene:([\w-]+)", "\n".join(texts))[-1]
        seen = self.asked.setdefault(scene, [])
        seen.append(request)
        behaviours = self.scenes[scene]
        await behaviours[min(len(seen), len(behaviours)) - 1](writer, request)


def respond(status: int, body: Any, **headers: str) -> Behaviour:
    """Answer with a status and a JSON (or text) body."""

    async def behave(writer: asyncio.StreamWriter, _: SeenRequest) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/html" if isinstance(body, str) else "application/json"
        lines = [
            f"HTTP/1.1 {status} X",
            f"content-type: {kind}",
            f"content-length: {len(data)}",
            "connection: close",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()

    return behave


def refuse(status: int, message: str = "no", code: str | None = None, **headers: str) -> Behaviour:
    """Answer with an error as OpenAI words it."""
    return respond(status, {"error": {"message": message, "type": "x", "code": code}}, **headers)


def complete(
    text: str | None, finish_reason: str = "stop", *, usage: dict[str, Any] | None = None, **fields: Any
) -> Behaviour:
    """Answer at once, without streaming.

    ``usage`` adds to the usage, and ``fields`` are those of the message besides its text.
    """

    async def behave(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        message = {"role": "assistant", "content": text, **fields}
        body = {
            "id": "c1", "object": "chat.completion", "created": 1, "model": request.body["model"] + "-real",
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200, **(usage or {})},
        }  # fmt: skip
        await respond(200, body)(writer, request)

    return behave


def stream(
    *pieces: str | dict[str, Any],
    finish_reason: str | None = "stop",
    cut: bool = False,
    usage: bool = True,
    ends: bool = True,
) -> Behaviour:
    """Answer in chunks of text, or of a delta.

    ``cut`` drops the connection in the middle of a chunk; without ``ends`` nothing says that the stream is
    over.
    """

    async def behave(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        await start_stream(writer)
        for piece in pieces:
            await send_chunk(writer, request, {"content": piece} if isinstance(piece, str) else piece)
        if cut:
            writer.write(b"ff\r\ndata: {")
            await writer.drain()
            return
        if finish_reason:
            await send_chunk(writer, request, {}, finish_reason)
        if usage and request.body.get("stream_options"):
            figures = {"prompt_tokens": 1000, "completion_tokens": 200, "total_tokens": 1200}
            await send_chunk(writer, request, None, usage=figures)
        if ends:
            await send_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return behave


def send_raw(body: str, *, status: int = 200, kind: str = "text/event-stream", **headers: str) -> Behaviour:
    """Answer with exactly these characters; the end of the connection ends the answer."""

    async def behave(writer: asyncio.StreamWriter, _: SeenRequest) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body.encode())
        await writer.drain()

    return behave


def hold(after: Behaviour | None = None) -> Behaviour:
    """Keep the request open for ever, after ``after`` (or nothing) was sent."""

    async def behave(writer: asyncio.StreamWriter, request: SeenRequest) -> None:
        if after is not None:
            await after(writer, request)
        await asyncio.Event().wait()

    return behave


async def start_stream(writer: asyncio.StreamWriter, _: SeenRequest | None = None) -> None:
    """Send the head of a streamed answer."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    await writer.drain()


async def send_chunk(
    writer: asyncio.StreamWriter,
    request: SeenRequest,
    delta: dict[str, Any] | None,
    finish_reason: str | None = None,
    usage: dict[str, int] | None = None,
) -> None:
    """Send one chunk of a streamed answer."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    chunk = {
        "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": request.body["model"] + "-real",
        "choices": choices, "usage": usage,
    }  # fmt: skip
    await send_event(writer, json.dumps(chunk))


async def send_event(writer: asyncio.StreamWriter, data: str) -> None:
    """Send one server-sent event."""
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
    await writer.drain()
