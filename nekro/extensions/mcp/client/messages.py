"""JSON-RPC messages and results as servers write them, made such that the SDK accepts them.

Servers put banners, escape sequences and log lines around messages, send ``null`` where the protocol has
nothing, and several messages at once. What is certainly meant is read; everything else is no message. The SDK
refuses a whole listing because of one entry, and a result because of one part: it gets results that it
accepts, and the session reads the originals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, REQUEST_TIMEOUT, RequestId, Result
from mcp_types.methods import validate_server_result
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from pydantic import ValidationError
from pydantic_core import from_json

from nekro.base.plain import encodable

__all__ = [
    "VALUE",
    "ClientDispatcher",
    "messages_of",
    "request_id_of",
    "said_code",
]


#: Key of a result that is no object: what the server sent in its place.
VALUE: Final = "nekro.value"
#: The SDK uses these two codes for its own errors, and servers use them for theirs, for example for a lost
#: session. A server's are moved out of the range of JSON-RPC.
_SHIFT: Final = 1_000_000

_SHARED_CODES: Final = frozenset((CONNECTION_CLOSED, REQUEST_TIMEOUT))
#: Blank characters, a byte order mark, NUL.
_BLANK: Final = " \t\r\n\ufeff\x00"

_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])"
)

_BEGIN: Final = re.compile(r'\{\s{0,8}"(?:jsonrpc|id|result|error|method|params)"\s{0,8}:')
#: Places of a line that are tried as the beginning of a message.
_MOST_TRIES: Final = 4
#: Objects and lists in each other, of a message that is not read as it is.
_MOST_DEPTH: Final = 150
#: Messages of a batch, or of one line.
_MOST_MESSAGES: Final = 1_000

_ANSWER_KEYS: Final = frozenset(("id", "result", "error"))

_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


def messages_of(data: bytes) -> list[dict[str, Any]]:
    """Return the messages of a line, an event or a body, as plain JSON that UTF-8 can encode.

    Behind other text, only answers are read: a log line that quotes a request is not a request.
    """
    text = _text(data)
    whole = _documents(text, 0)
    if whole is not None:
        return [message for one in whole if (message := _message(one)) is not None]
    bare = _ESCAPE.sub("", text) if "\x1b" in text else text
    if bare is not text and (whole := _documents(bare, 0)) is not None:
        return [message for one in whole if (message := _message(one)) is not None]
    for match in islice(_BEGIN.finditer(bare), _MOST_TRIES):
        found = _documents(bare, match.start())
        if found is not None:
            read = [message for one in found if (message := _message(one)) is not None]
            return [message for message in read if "method" not in message]
    return []


def request_id_of(value: object) -> int | str | None:
    """Return an id as the SDK compares it: a number in a text is that number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,15}", value):
        return int(value)
    return value


def said_code(code: int) -> int | None:
    """Return the code that a server sent; None if the error is the SDK's own."""
    if code in _SHARED_CODES:
        return None
    return code + _SHIFT if code + _SHIFT in _SHARED_CODES else code


def _text(data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    return data.decode(encoding, "replace").strip(_BLANK)


def _documents(text: str, start: int) -> list[Any] | None:
    """Return the objects of a text that consists of JSON documents from ``start`` on; None if it does not."""
    if text[start : start + 1] not in ("{", "["):
        return None
    found: list[Any] = []
    try:
        document: Any = from_json(text[start:] if start else text, allow_inf_nan=False)
        found += document[:_MOST_MESSAGES] if isinstance(document, list) else [document]
    except ValueError:  # also for text that cannot be passed on, and for nesting that the SDK refuses
        return _lenient_documents(text, start)
    return found


def _lenient_documents(text: str, end: int) -> list[Any] | None:
    found: list[Any] = []
    while end < len(text) and len(found) < _MOST_MESSAGES:
        try:
            document, end = _DECODER.raw_decode(text, end)
        except (ValueError, RecursionError):
            return None
        document = encodable(_pruned(document, _MOST_DEPTH))
        found += document[:_MOST_MESSAGES] if isinstance(document, list) else [document]
        end = _after_blank(text, end)
    return found


def _pruned(value: Any, depth: int) -> Any:
    """Return a value without what is nested deeper."""
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_pruned(item, depth - 1) for item in value]
    return {key: _pruned(item, depth - 1) for key, item in value.items()}


def _after_blank(text: str, at: int) -> int:
    while at < len(text):
        if text[at] in _BLANK:
            at += 1
        elif (match := _ESCAPE.match(text, at)) is not None:
            at = match.end()
        else:
            break
    return at


def _message(raw: object) -> dict[str, Any] | None:
    # A log line in JSON may have a method, an id and a result too.
    if not isinstance(raw, dict) or ("jsonrpc" not in raw and not raw.keys() <= _ANSWER_KEYS):
        return None
    if isinstance(raw.get("method"), str):
        return _question(raw)
    if raw.get("error") is not None and not (raw["error"] in (False, "", {}) and "result" in raw):
        return {"jsonrpc": "2.0", "id": request_id_of(raw.get("id")), "error": _error(raw["error"])}
    if "result" in raw:
        result = raw["result"]
        if not isinstance(result, dict):
            result = {} if result is None else {VALUE: result}
        return {"jsonrpc": "2.0", "id": request_id_of(raw.get("id")), "result": result}
    return None


def _question(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a request, or a notification if it has no id or is named like one."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": raw["method"]}
    request_id = raw.get("id")
    is_request = isinstance(request_id, int | str) and not isinstance(request_id, bool)
    if is_request and not raw["method"].startswith("notifications/"):
        message["id"] = request_id
    if isinstance(raw.get("params"), dict):
        message["params"] = raw["params"]
    return message


def _error(raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        return {"code": CONNECTION_CLOSED - _SHIFT, "message": str(raw)}
    code = raw.get("code")
    if isinstance(code, str) and re.fullmatch(r"-?[0-9]{1,9}", code):
        code = int(code)
    if isinstance(code, bool) or not isinstance(code, int):
        code = INTERNAL_ERROR
    text = raw.get("message")
    error: dict[str, Any] = {
        "code": code - _SHIFT if code in _SHARED_CODES else code,
        "message": text if isinstance(text, str) else "" if text is None else json.dumps(text),
    }
    if raw.get("data") is not None:
        error["data"] = raw["data"]
    return error


#: Key in ``_meta`` of a result that stands for the original with this number.
_ORIGINAL: Final = "nekro/original"
#: What the newest version wants to know about a result.
_NOT_CACHED: Final[Mapping[str, Any]] = {"ttlMs": 0, "cacheScope": "private"}
#: A tool mirrors arguments into headers by this key of its schema (2026-07-28).
_HEADER_KEY: Final = "x-mcp-header"


class ClientDispatcher(JSONRPCDispatcher[TransportContext]):
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
            "serverInfo": {key: _as_text(about.get(key)) for key in ("name", "version")},
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


def _as_text(value: object) -> str:
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
