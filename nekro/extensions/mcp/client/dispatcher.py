"""Requests of a session, below the SDK's models: results come back as the server sent them.

The SDK refuses a whole listing because of one entry, and a result because of one part. Here it gets results
that it accepts, and the session reads the originals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import RequestId, Result
from mcp_types.methods import validate_server_result
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from pydantic import ValidationError

__all__ = ["Dispatcher"]

#: Key in ``_meta`` of a result that stands for the original with this number.
_ORIGINAL: Final = "nekro/original"
#: What the newest version wants to know about a result.
_NOT_CACHED: Final[Mapping[str, Any]] = {"ttlMs": 0, "cacheScope": "private"}
#: A tool mirrors arguments into headers by this key of its schema (2026-07-28).
_HEADER_KEY: Final = "x-mcp-header"


class Dispatcher(JSONRPCDispatcher[TransportContext]):
    """The SDK's dispatcher, whose results the SDK's session always accepts."""

    def __init__(self, read_stream: Any, write_stream: Any) -> None:
        super().__init__(read_stream, write_stream)
        self._originals: dict[int, dict[str, Any]] = {}
        self._count = 0
        #: Version that the server named in its handshake; None before, or if it named none.
        self.stated_version: str | None = None
        #: Whether the SDK mirrors arguments into headers, as the newest version does.
        self.mirrors_arguments = False

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        *,
        _related_request_id: RequestId | None = None,
    ) -> dict[str, Any]:
        """Send a request and return a result that the SDK accepts; ``original`` returns the server's."""
        raw = await super().send_raw_request(method, params, opts, _related_request_id=_related_request_id)
        if method == "initialize":
            return self._handshake(raw)
        if method == "server/discover":
            return _discovery(raw)
        if method == "tools/list":
            tools = list(_with_headers(raw)) if self.mirrors_arguments else []
            return self._kept(raw, {"tools": tools, **_NOT_CACHED})
        if method == "tools/call" and raw.get("resultType") != "input_required":
            return self._kept(raw, {"content": []})
        return raw

    def original(self, result: Result) -> dict[str, Any]:
        """Return what the server sent in place of a result, once."""
        return self._originals.pop((result.meta or {})[_ORIGINAL])

    def _kept(self, raw: dict[str, Any], accepted: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        self._originals[self._count] = raw
        return {"resultType": "complete", "_meta": {_ORIGINAL: self._count}, **accepted}

    def _handshake(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the result of ``initialize`` with what it must have.

        A version that is unknown here is answered with the newest known one; the server decides about it.
        """
        version = raw.get("protocolVersion")
        self.stated_version = version if isinstance(version, str) else None
        about = raw.get("serverInfo")
        about = about if isinstance(about, dict) else {}
        instructions = raw.get("instructions")
        is_known = version in HANDSHAKE_PROTOCOL_VERSIONS
        return {
            "protocolVersion": version if is_known else LATEST_HANDSHAKE_VERSION,
            "capabilities": _capabilities(raw.get("capabilities")),
            "serverInfo": {key: _text(about.get(key)) for key in ("name", "version")},
            **({"instructions": instructions} if isinstance(instructions, str) else {}),
        }


def _discovery(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the result of ``server/discover`` with what it must have; without versions it is none."""
    versions = raw.get("supportedVersions")
    if not isinstance(versions, list):
        return raw
    meta, instructions = raw.get("_meta"), raw.get("instructions")
    return {
        "resultType": "complete",
        "supportedVersions": [one for one in versions if isinstance(one, str)],
        "capabilities": _capabilities(raw.get("capabilities")),
        **_NOT_CACHED,
        **({"_meta": meta} if isinstance(meta, dict) else {}),
        **({"instructions": instructions} if isinstance(instructions, str) else {}),
    }


def _capabilities(raw: object) -> dict[str, Any]:
    """Return what a server can do; one that says nothing may have tools."""
    if not isinstance(raw, dict) or not raw:
        return {"tools": {}}
    features = ("tools", "resources", "prompts", "logging")
    known: dict[str, Any] = {}
    for key in features:
        options = raw.get(key)
        if options not in (None, False):
            options = options if isinstance(options, dict) else {}
            known[key] = {option: value for option, value in options.items() if isinstance(value, bool)}
    return known or {"experimental": {}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:100]


def _with_headers(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tools whose arguments the SDK mirrors into headers."""
    tools = raw.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        schema = tool.get("inputSchema") if isinstance(tool, dict) else None
        try:
            has_headers = isinstance(schema, dict) and _HEADER_KEY in json.dumps(schema)
        except RecursionError:
            has_headers = False
        if not has_headers:
            continue
        accepted = {"name": tool.get("name"), "inputSchema": schema}
        page = {"tools": [accepted], "resultType": "complete", **_NOT_CACHED}
        try:
            validate_server_result("tools/list", LATEST_MODERN_VERSION, page)
        except (ValidationError, RecursionError):
            continue
        yield accepted
