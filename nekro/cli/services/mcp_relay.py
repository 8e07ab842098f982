"""Relays MCP messages between the standard streams and `/mcp` of a gateway, as they are.

Each request of the host is one POST, whose answer is written as it comes. It needs no SDK.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import httpx

from nekro.base.tasks import end_tasks
from nekro.cli.services.mcp_stdio import HostStreams, host_streams
from nekro_client.answer_limits import limited
from nekro_client.operations import connection_options
from nekro_client.sse import EventParser, EventTooLargeError
from nekro_client.streams import STREAM_TIMEOUT

__all__ = ["relay"]

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
