"""What MCP servers of others send, one line per behaviour, with where it was reported."""

from __future__ import annotations

import base64
import json
from typing import Any

from raw_peer import ECHO, Reply, reply, said

from nekro_agent.errors import MethodFailedError, OutcomeUnknownError


def error(code: int, message: str, **more: Any) -> bytes:
    return json.dumps(
        {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}, **more}
    ).encode()


def refused(status: int, body: bytes = b"", kind: str | None = "application/json") -> Reply:
    return Reply(status=status, body=body, kind=kind)


LOST = {
    "python-sdk#1676 404 -32001": refused(404, error(-32001, "Session not found")),
    "claude-code#55970 404 -32600": refused(404, error(-32600, "Session not found", id="server-error")),
    "go-sdk 404 text": refused(404, b"session not found\n", "text/plain"),
    "mcp-proxy#149 404 empty": refused(404, b"", None),
    "404 of a proxy": refused(404, b"<html><h1>Not Found</h1></html>", "text/html"),
    "OmniRoute#5957 404 -32000": refused(404, error(-32000, "Not Found: Unknown Mcp-Session-Id header")),
    "affine-mcp-server#301 400": refused(400, error(-32000, "Bad Request: No valid session ID or not an initialize request")),
    "mcphub#405 400": refused(400, error(-32000, "Bad Request: No valid session ID provided")),
    "typescript-sdk 400 not initialized": refused(400, error(-32000, "Bad Request: Server not initialized")),
    "csharp-sdk#1759 400": refused(400, error(-32600, "Bad Request: Missing session ID")),
    "anubis-mcp#123 400": refused(400, b'{"error": "No active session"}'),
    "python-sdk#1004 400 text": refused(400, b"Bad Request: No valid session ID provided", "text/plain"),
    "java-sdk 400": refused(400, b'{"jsonRpcError": {"code": -32600, "message": "Session ID missing"}}'),
    "400 without words": refused(400, error(-32600, "Invalid request")),
    "400 of a framework": refused(400, b'{"detail": "Bad Request"}'),
    "400 in Chinese": refused(400, error(-32000, "会话不存在")),
    "400 empty": refused(400, b"", None),
    "rust-sdk#689 401": refused(401, b"Unauthorized: Session not found", "text/plain"),
    "rust-sdk 422": refused(422, b"Unexpected message, expect initialize request", "text/plain"),
    "mcp-proxy#108 401": refused(401, b"", None),
    "breeze#3744 403": refused(403, error(-32001, "Mcp-Session-Id principal mismatch")),
    "410": refused(410, b"", None),
    "neotoma#1923 503": refused(503, error(-32000, "Unknown or expired session")),
    "fastmcp#121 500": refused(500, b'{"error": "HTTP 400: No valid session ID provided"}'),
    "200 -32001": refused(200, error(-32001, "Session not found")),
    "200 not initialized": refused(200, error(-32002, "Server not initialized")),
    "ironclaw#1436 200": refused(200, error(0, 'method "tools/call" is invalid during session initialization')),
}  # fmt: skip


#: Answers to a call that the server may have run, or ran: it is not made again.
RAN = {
    "a tool's own session": (reply({"jsonrpc": "2.0", "id": None, "error": {"code": -32603, "message": "Browser session not found"}}), MethodFailedError),
    "a tool's own session, 200 -32000": (reply({"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "terminal session expired"}}), MethodFailedError),
    "a tool's error": (reply({"jsonrpc": "2.0", "id": None, "result": {"isError": True, "content": [{"type": "text", "text": "Session not found"}]}}), MethodFailedError),
    "400 invalid params": (refused(400, error(-32602, "session_id is required")), MethodFailedError),
    "404 method not found": (refused(404, error(-32601, "Method not found")), MethodFailedError),
    "500": (refused(500, b"Internal Server Error", "text/plain"), MethodFailedError),
    "429": (refused(429, b"slow down", "text/plain"), MethodFailedError),
    "502 of a proxy": (refused(502, b"<html>Bad Gateway</html>", "text/html"), OutcomeUnknownError),
    "504 of a proxy": (refused(504, b"", None), OutcomeUnknownError),
    "200 empty": (Reply(body=b""), OutcomeUnknownError),
    "200 HTML (python-sdk#1382)": (Reply(body=b"<html>Sign in</html>", kind="text/html"), OutcomeUnknownError),
    "202 without a body": (Reply(status=202, kind=None), OutcomeUnknownError),
    "an event stream that ends": (Reply(body=b": bye\n\n", kind="text/event-stream"), OutcomeUnknownError),
}  # fmt: skip


def sse(*events: str) -> bytes:
    return "".join(events).encode()


def hello(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    return said(message, {"content": [{"type": "text", "text": "hello"}]}, **more)


def text_of(message: dict[str, Any], **more: Any) -> str:
    return json.dumps(hello(message, **more))


FORMS: dict[str, Any] = {
    "JSON": lambda m: reply(hello(m)),
    "java-sdk#748 JSON as text/plain": lambda m: reply(hello(m), kind="text/plain; charset=utf-8"),
    "dify-plugin-agent-mcp_sse#79 no content type": lambda m: reply(hello(m), kind=None),
    "JSON with a byte order mark": lambda m: Reply(body=b"\xef\xbb\xbf" + text_of(m).encode()),
    "JSON behind blank lines": lambda m: Reply(body=[b"\r\n", b" \n", text_of(m).encode()]),
    "JSON as an event stream": lambda m: reply(hello(m), kind="text/event-stream"),
    "JSON behind a warning": lambda m: Reply(body=b"<br />Warning: x in y.php\n" + text_of(m).encode(), kind="text/html"),
    "events as JSON": lambda m: Reply(body=sse(f"event: message\ndata: {text_of(m)}\n\n")),
    "events as text": lambda m: Reply(body=sse(f"data: {text_of(m)}\n\n"), kind="text/plain"),
    "202 with a body": lambda m: reply(hello(m), status=202),
    "201": lambda m: reply(hello(m), status=201),
    "python-sdk#1720 id as text": lambda m: reply(hello(m, id=str(m["id"]))),
    "id as a float": lambda m: reply(hello(m, id=float(m["id"]))),
    "helidon-mcp#65 id null": lambda m: reply(hello(m, id=None)),
    "radare2-mcp#68 id always 0": lambda m: reply(hello(m, id=0)),
    "error null beside the result": lambda m: reply(hello(m, error=None)),
    "no jsonrpc": lambda m: reply({key: value for key, value in hello(m).items() if key != "jsonrpc"}),
    "jsonrpc 1.0": lambda m: reply(hello(m, jsonrpc="1.0")),
    "unknown members": lambda m: reply(hello(m, timestamp=1, trace={"a": [1]})),
    "a batch": lambda m: reply([{"jsonrpc": "2.0", "method": "notifications/x"}, hello(m)]),
    "half a surrogate pair": lambda m: Reply(body=text_of(m).replace('"hello"', '"hello", "x": "\\ud83d"').encode()),
    "a control character in a text": lambda m: Reply(body=text_of(m).replace('"hello"', '"hello", "x": "a\tb"').encode()),
    "NaN": lambda m: Reply(body=text_of(m).replace('"hello"', '"hello", "x": NaN').encode()),
    "invalid UTF-8": lambda m: Reply(body=text_of(m).encode().replace(b'"hello"', b'"hello", "x": "\xff\xfe"')),
    "events with CRLF": lambda m: Reply(body=sse(f"event: message\r\ndata: {text_of(m)}\r\n\r\n"), kind="text/event-stream"),
    "events with CR": lambda m: Reply(body=sse(f"data: {text_of(m)}\r\r"), kind="text/event-stream"),
    "events with a byte order mark": lambda m: Reply(body=sse(f"\ufeffdata: {text_of(m)}\n\n"), kind="text/event-stream"),
    "comments and pings": lambda m: Reply(body=sse(": ping\n\n", "event: ping\ndata: {}\n\n", f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
    "an event name of its own": lambda m: Reply(body=sse(f"event: response\ndata: {text_of(m)}\n\n"), kind="text/event-stream"),
    "data without a space, id and retry": lambda m: Reply(body=sse(f"id:7\nretry:10\ndata:{text_of(m)}\n\n"), kind="text/event-stream"),
    "data on several lines": lambda m: Reply(body=sse(*(f"data: {line}\n" for line in json.dumps(hello(m), indent=1).split("\n")), "\n"), kind="text/event-stream"),
    "no blank line at the end": lambda m: Reply(body=sse(f"data: {text_of(m)}"), kind="text/event-stream"),
    "byte by byte": lambda m: Reply(body=[bytes([one]) for one in sse(f"data: {text_of(m)}\r\n\r\n")], kind="text/event-stream"),
    "[DONE] behind it": lambda m: Reply(body=sse(f"data: {text_of(m)}\n\n", "data: [DONE]\n\n"), kind="text/event-stream"),
    "[DONE] before it": lambda m: Reply(body=sse("data: [DONE]\n\n", f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
    "an answer to an unknown id before it": lambda m: Reply(body=sse(f"data: {json.dumps(said({'id': 999}, {'content': []}))}\n\n", f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
    "unknown notifications before it": lambda m: Reply(body=sse('data: {"jsonrpc":"2.0","method":"notifications/made-up","params":[1]}\n\n', 'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"loud"}}\n\n', f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
    "progress of an unknown token before it": lambda m: Reply(body=sse('data: {"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":"x","progress":"half"}}\n\n', f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
    "a request of the server before it": lambda m: Reply(body=sse('data: {"jsonrpc":"2.0","id":"s","method":"roots/list"}\n\n', 'data: {"jsonrpc":"2.0","id":"p","method":"ping"}\n\n', f"data: {text_of(m)}\n\n"), kind="text/event-stream"),
}  # fmt: skip


HANDSHAKES: dict[str, Any] = {
    "a version of the future": {"protocolVersion": "2099-01-01", "capabilities": {"tools": {}}, "serverInfo": {"name": "n", "version": "1"}},
    "a version that is none": {"protocolVersion": "1.0", "capabilities": {"tools": {}}, "serverInfo": {"name": "n", "version": "1"}},
    "no version": {"capabilities": {"tools": {}}, "serverInfo": {"name": "n", "version": "1"}},
    "no capabilities": {"protocolVersion": "2025-06-18", "serverInfo": {"name": "n", "version": "1"}},
    "capabilities null": {"protocolVersion": "2025-06-18", "capabilities": None, "serverInfo": {"name": "n"}},
    "capabilities empty": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "n", "version": None}},
    "capabilities of other types": {"protocolVersion": "2025-06-18", "capabilities": {"tools": True, "logging": None, "x": 1}, "serverInfo": "n"},
    "no serverInfo": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}},
    "serverInfo with bad icons": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {"listChanged": "yes"}}, "serverInfo": {"name": "n", "version": 2, "icons": [{}]}, "instructions": None},
    "nothing": {},
}  # fmt: skip


OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}
#: Entries of a listing, what the note on each says, and arguments that pass.
ENTRIES: dict[str, tuple[Any, str | None, dict[str, Any] | None]] = {
    "mastra#21859 no schema": ({"name": "t"}, "no inputSchema", {"a": 1, "b": [2]}),
    "Unity-MCP#440 schema null": ({"name": "t", "inputSchema": None}, "no inputSchema", {"a": 1}),
    "schema true": ({"name": "t", "inputSchema": True}, "not an object", {"a": 1}),
    "schema a list": ({"name": "t", "inputSchema": []}, "not an object", {"a": 1}),
    "schema a text": ({"name": "t", "inputSchema": json.dumps(OBJECT)}, None, {"a": "1"}),
    "schema empty": ({"name": "t", "inputSchema": {}}, "type object", {"a": 1}),
    "servers#3051 a dialect only": ({"name": "t", "inputSchema": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "type object", {"a": 1}),
    "claude-code#88049 anyOf": ({"name": "t", "inputSchema": {"anyOf": [OBJECT, {"type": "object", "properties": {"b": {"type": "integer"}}}]}}, "anyOf at the top", {"b": 1}),
    "oneOf": ({"name": "t", "inputSchema": {"type": "object", "oneOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]}}, "oneOf at the top", {"b": 1}),
    "allOf and $ref": ({"name": "t", "inputSchema": {"allOf": [OBJECT, {"$ref": "#/$defs/x"}], "$defs": {"x": {"properties": {"b": {}}, "required": ["b"]}}}}, "allOf at the top", {"b": 1, "a": "x"}),
    "$ref at the top": ({"name": "t", "inputSchema": {"$ref": "#/definitions/x", "definitions": {"x": OBJECT}}}, "$ref at the top", {"a": "1"}),
    "$ref elsewhere": ({"name": "t", "inputSchema": {"$ref": "https://example.org/x.json"}}, "$ref at the top", {"z": 1}),
    "$ref to itself": ({"name": "t", "inputSchema": {"$ref": "#"}}, "$ref at the top", {"z": 1}),
    "type a list": ({"name": "t", "inputSchema": {"type": ["object", "null"], "properties": {"a": {}}}}, "type object", {"a": 1}),
    "atlas-ui-3#727 type string": ({"name": "t", "inputSchema": {"type": "string"}}, "type object", {"a": 1}),
    "properties a list": ({"name": "t", "inputSchema": {"type": "object", "properties": ["a"]}}, None, {"a": 1}),
    "property true": ({"name": "t", "inputSchema": {"type": "object", "properties": {"a": True}, "required": "a"}}, None, {"a": 1}),
    "required without properties": ({"name": "t", "inputSchema": {"type": "object", "required": ["a", 1]}}, None, {"a": 1}),
    "schema nested deeply": ({"name": "t", "inputSchema": json.loads('{"properties": ' * 400 + "1" + "}" * 400)}, "nested too deeply", {"a": 1}),
    "bad icons": ({"name": "t", "inputSchema": OBJECT, "icons": [{"href": 1}]}, "icons are invalid", {"a": "1"}),
    "bad annotations": ({"name": "t", "inputSchema": OBJECT, "annotations": ["readOnlyHint"]}, "annotations are not an object", {"a": "1"}),
    "a hint as text": ({"name": "t", "inputSchema": OBJECT, "annotations": {"readOnlyHint": "true", "idempotentHint": 1}}, "neither true nor false", {"a": "1"}),
    "longhand#10 array as output": ({"name": "t", "inputSchema": OBJECT, "outputSchema": {"type": "array", "items": {}}}, "type array", {"a": "1"}),
    "output schema true": ({"name": "t", "inputSchema": OBJECT, "outputSchema": True}, "outputSchema is not an object", {"a": "1"}),
    "deepchat#2075 output schema of no type": ({"name": "t", "inputSchema": OBJECT, "outputSchema": {"type": "object", "properties": {"a": {"type": {"x": 1}}}}}, None, {"a": "1"}),
    "description null": ({"name": "t", "inputSchema": OBJECT, "description": None, "title": None}, None, {"a": "1"}),
    "description an object": ({"name": "t", "inputSchema": OBJECT, "description": {"en": "x"}}, "description is not a text", {"a": "1"}),
    "description of megabytes": ({"name": "t", "inputSchema": OBJECT, "description": "x" * 3_000_000}, None, {"a": "1"}),
    "unknown fields": ({"name": "t", "inputSchema": OBJECT, "_meta": 1, "execution": [], "x-y": {}, "parameters": None}, None, {"a": "1"}),
    "half a surrogate pair": ({"name": "t", "inputSchema": {"type": "object", "description": "\ud83d", "properties": {"a": {"description": "\udc00"}}}, "description": "\ud83d"}, None, {"a": "1"}),
    "a name of odd characters": ({"name": "t/ü 🚀.x", "inputSchema": OBJECT}, None, {"a": "1"}),
    "no name": ({"inputSchema": OBJECT}, "it has no name", None),
    "an empty name": ({"name": "", "inputSchema": OBJECT}, "it has no name", None),
    "a blank name": ({"name": " \n", "inputSchema": OBJECT}, "it has no name", None),
    "a name that is a number": ({"name": 7, "inputSchema": OBJECT}, "it has no name", None),
    "a name too long": ({"name": "x" * 5_000, "inputSchema": OBJECT}, "more than 200 characters", None),
    "a duplicate": ({**ECHO, "description": "another one"}, "the same name", None),
    "null": (None, "not an object", None),
    "a text": ("tool", "not an object", None),
    "a list": ([ECHO], "not an object", None),
}  # fmt: skip


CURSORS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "none": ({"first": None}, 1, None),
    "java-sdk#628 empty": ({"first": ""}, 1, None),
    "a number": ({"first": 0}, 1, None),
    "an object": ({"first": {}}, 1, None),
    "two pages": ({"first": "a", "a": None}, 2, None),
    "codebase-memory-mcp#1247 itself": ({"first": "a", "a": "a"}, 2, "nothing new"),
    "a cycle of two": ({"first": "a", "a": "b", "b": "a"}, 3, "nothing new"),
    "megabytes": ({"first": "a" * 1_000_000}, 1, "nothing new"),
    "always a new one": ({"*": lambda cursor: f"{cursor}x", "first": "a"}, 100, "after 100 pages"),
}  # fmt: skip


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
#: Bytes whose base64 has both letters that the URL-safe alphabet replaces, and padding.
ODD_BYTES = b"\x89PNG\r\n\x1a\n\xfb\xef\xff\xfe"
B64 = base64.b64encode(PNG).decode()
ODD_B64 = base64.urlsafe_b64encode(ODD_BYTES).decode()
TEXT = {"type": "text", "text": "t"}

RESULTS: dict[str, tuple[Any, Any]] = {
    "python-sdk#1796 no content": ({"structuredContent": {"a": 1}}, {"a": 1}),
    "nothing": ({}, None),
    "null": (None, None),
    "content null": ({"content": None}, None),
    "isError null": ({"content": [TEXT], "isError": None}, "t"),
    "isError false as text": ({"content": [TEXT], "isError": "false"}, "t"),
    "content an object": ({"content": TEXT}, "t"),
    "content a text": ({"content": "t"}, "t"),
    "content a list of texts": ({"content": ["t", "u"]}, ["t", "u"]),
    "a text as result": ("t", "t"),
    "a list as result": ([TEXT], "t"),
    "toolResult of 2024": ({"toolResult": {"a": 1}}, {"a": 1}),
    "a part without a type": ({"content": [{"text": "t"}]}, "t"),
    "a text that is null": ({"content": [{"type": "text", "text": None}]}, ""),
    "a text that is an object": ({"content": [{"type": "text", "text": {"a": 1}}]}, {"a": 1}),
    "unpaywall-mcp#4 an unknown kind": ({"content": [{"type": "json", "json": {"a": 1}}]}, {"type": "json", "json": {"a": 1}}),
    "agent-os#2020 a widget beside a text": ({"content": [{"type": "widget"}, TEXT]}, [{"type": "widget"}, "t"]),
    "null parts": ({"content": [None, TEXT]}, [None, "t"]),
    "bad annotations of a part": ({"content": [{**TEXT, "annotations": {"audience": "x", "priority": 9}}]}, "t"),
    "CSM#28 structured content a list": ({"content": [], "structuredContent": [1]}, [1]),
    "structured content null": ({"content": [TEXT], "structuredContent": None}, "t"),
    "structured content false": ({"content": [], "structuredContent": False}, False),
    "a resource without an address": ({"content": [{"type": "resource", "resource": {"text": "t"}}]}, "t"),
    "a resource without content": ({"content": [{"type": "resource", "resource": {"uri": "x:y"}}]}, {"uri": "x:y"}),
    "a resource that is a text": ({"content": [{"type": "resource", "resource": "x"}]}, {"type": "resource", "resource": "x"}),
    "a link without a name": ({"content": [{"type": "resource_link", "uri": "x:y"}]}, {"uri": "x:y"}),
    "half a surrogate pair": ({"content": [{"type": "text", "text": "a\ud83d"}]}, "a\\ud83d"),
    "a kind of result of the future": ({"content": [TEXT], "resultType": "partial"}, "t"),
    "unknown fields": ({"content": [TEXT], "_meta": None, "status": 1}, "t"),
}  # fmt: skip


FILES: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "as the protocol says": ({"type": "image", "data": B64, "mimeType": "image/png"}, PNG, ".png"),
    "line breaks": ({"type": "image", "data": "\r\n".join(B64[at : at + 20] for at in range(0, len(B64), 20)) + "\n", "mimeType": "image/png"}, PNG, ".png"),
    "URL-safe": ({"type": "image", "data": ODD_B64, "mimeType": "image/png"}, ODD_BYTES, ".png"),
    "no padding": ({"type": "image", "data": ODD_B64.rstrip("="), "mimeType": "image/png"}, ODD_BYTES, ".png"),
    "a data URL": ({"type": "image", "data": f"data:image/png;base64,{B64}", "mimeType": "image/png"}, PNG, ".png"),
    "a data URL without a type": ({"type": "image", "data": f"data:;base64,{B64}"}, PNG, ".png"),
    "a data URL of a text": ({"type": "resource", "resource": {"blob": "data:text/csv,a%2Cb"}}, b"a,b", ".csv"),
    "a wrong type": ({"type": "image", "data": B64, "mimeType": "image/jpeg"}, PNG, ".png"),
    "a type that is none": ({"type": "image", "data": B64, "mimeType": "PNG"}, PNG, ".png"),
    "no type": ({"type": "audio", "data": base64.b64encode(b"RIFF\0\0\0\0WAVEfmt ").decode()}, b"RIFF\0\0\0\0WAVEfmt ", ".wav"),
    "a type that is a number": ({"type": "image", "data": base64.b64encode(b"?").decode(), "mimeType": 7}, b"?", ".bin"),
    "a resource without an address": ({"type": "resource", "resource": {"blob": B64}}, PNG, ".png"),
}  # fmt: skip
