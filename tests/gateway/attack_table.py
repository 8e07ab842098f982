# ruff: noqa: E501 - one line per attempt
"""Attempts against a gateway, each with what it gets; ``docs/gateway-attacks.md`` lists them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from raw_http import request_bytes

from nekro.operations.pages import cursor_of

__all__ = ["KEYED", "LIMITED", "LOCAL", "OTHERS", "PAGE", "Attempt", "World", "page"]

MESSAGE: Final = {"text": "hi", "user_id": "ada"}
LANE: Final = {"lane": "long"}
AWAKE: Final = {"is_awake": True}
PAGE: Final = "gateway-attacks.md"


@dataclass(frozen=True, kw_only=True)
class World:
    """What the attempts know of the attacked gateway."""

    #: Keys by name.
    keys: dict[str, str]
    #: Ids of things of another chat: ``turn``, ``job``, ``timer``, and of a key: ``key``.
    ids: dict[str, str]

    def bearer(self, name: str, **headers: str) -> dict[str, str]:
        """Headers with a key."""
        return {"Authorization": f"Bearer {self.keys[name]}", **headers}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One request and its answer."""

    text: str
    #: Status and code of the answer; 0: the connection is closed without one.
    gets: tuple[int, str]
    #: Returns the bytes to send.
    send: Callable[[World], bytes]
    #: Whether the client closes its half after sending.
    ends: bool = False


def _a(text: str, status: int, code: str, send: Callable[[World], bytes], **more: Any) -> Attempt:
    return Attempt(text=text, gets=(status, code), send=send, **more)


def _with_key(text: Callable[[World], str]) -> Callable[[World], bytes]:
    return lambda w: request_bytes("GET", "/api/v1/keys", {"Authorization": text(w)})


def _get(path: str, key: str, **headers: str) -> Callable[[World], bytes]:
    return lambda w: request_bytes("GET", path.format(**w.ids), w.bearer(key, **headers))


def _post(path: str, key: str, body: Any, **headers: str) -> Callable[[World], bytes]:
    return lambda w: request_bytes("POST", path.format(**w.ids), w.bearer(key, **headers), body)


def _put(path: str, key: str, body: Any) -> Callable[[World], bytes]:
    return lambda w: request_bytes("PUT", path.format(**w.ids), w.bearer(key), body)


def _delete(path: str, key: str) -> Callable[[World], bytes]:
    return lambda w: request_bytes("DELETE", path.format(**w.ids), w.bearer(key))


def _secret(w: World) -> str:
    return w.keys["all"].split("_", 2)[2]


def _id(w: World) -> str:
    return w.keys["all"].split("_", 2)[1]


_FORM: Final = "multipart/form-data; boundary=b"
_END: Final = b"--b--\r\n"


def _part(name: str, content: bytes, *headers: str, file: bool = True) -> bytes:
    """A part of a form."""
    shown = f'Content-Disposition: form-data; name="{name}"' + ('; filename="a.txt"' if file else "")
    head = "".join(f"{line}\r\n" for line in (shown, *headers))
    return b"--b\r\n" + head.encode() + b"\r\n" + content + b"\r\n"


def _form(
    *parts: bytes, path: str = "/api/v1/chats/site-1/files", kind: str = _FORM
) -> Callable[[World], bytes]:
    return _post(path, "all", b"".join(parts), **{"Content-Type": kind})


def _encoded(coding: str, body: bytes, path: str = "/api/v1/calls") -> Callable[[World], bytes]:
    return _post(path, "all", body, **{"Content-Encoding": coding})


_INVALID: Final = (401, "key_invalid")
_MISSING: Final = (401, "key_missing")
_LACKS: Final = (403, "scope_missing")
_LIMITED: Final = (403, "key_restricted")
_NONE: Final = (404, "not_found")
_BAD: Final = (422, "invalid_request")
_REFUSED: Final = (400, "invalid_request")

_KEYS: Final = [
    _a("no key", *_MISSING, lambda w: request_bytes("GET", "/api/v1/keys")),
    _a("an empty key", *_INVALID, _with_key(lambda w: "Bearer ")),
    _a("a password (Basic)", *_INVALID, _with_key(lambda w: "Basic YWRtaW46YWRtaW4=")),
    _a(
        "an unknown key of the right form", *_INVALID, _with_key(lambda w: f"Bearer nk_{'0' * 16}_{'A' * 43}")
    ),
    _a("a known id with a guessed secret", *_INVALID, _with_key(lambda w: f"Bearer nk_{_id(w)}_{'A' * 43}")),
    _a(
        "a secret with its last character changed",
        *_INVALID,
        _with_key(lambda w: "Bearer " + w.keys["all"][:-1] + ("A" if w.keys["all"][-1] != "A" else "E")),
    ),
    _a("a secret cut by one character", *_INVALID, _with_key(lambda w: f"Bearer {w.keys['all'][:-1]}")),
    _a("a secret with one more character", *_INVALID, _with_key(lambda w: f"Bearer {w.keys['all']}A")),
    _a(
        "the secret of one key with the id of another",
        *_INVALID,
        _with_key(lambda w: f"Bearer nk_{w.keys['read'].split('_')[1]}_{_secret(w)}"),
    ),
    _a("an id in capitals", *_INVALID, _with_key(lambda w: f"Bearer nk_{_id(w).upper()}X_{_secret(w)}")),
    _a("SQL in the id", *_INVALID, _with_key(lambda w: f"Bearer nk_' OR '1'='1_{_secret(w)}")),
    _a("a pattern as id", *_INVALID, _with_key(lambda w: f"Bearer nk_%_{_secret(w)}")),
    _a("bytes outside of ASCII", *_INVALID, _with_key(lambda w: f"Bearer nk_{_id(w)}_ü{'A' * 42}")),
    _a("a revoked key", *_INVALID, _get("/api/v1/keys", "revoked")),
    _a("an expired key", *_INVALID, _get("/api/v1/keys", "expired")),
    _a("a key in the URL", *_MISSING, lambda w: request_bytes("GET", f"/api/v1/keys?key={w.keys['all']}")),
    _a(
        "a key in a cookie",
        *_MISSING,
        lambda w: request_bytes("GET", "/api/v1/keys", {"Cookie": f"key={w.keys['all']}"}),
    ),
    _a(
        "two Authorization headers, one of them valid",
        *_INVALID,
        lambda w: request_bytes(
            "GET",
            "/api/v1/keys",
            [("Authorization", "Bearer x"), ("Authorization", f"Bearer {w.keys['all']}")],
        ),
    ),
    _a(
        "headers that claim to come from this machine",
        *_MISSING,
        lambda w: request_bytes(
            "GET", "/api/v1/keys", {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1"}
        ),
    ),
    _a("metrics without a key", *_MISSING, lambda w: request_bytes("GET", "/metrics")),
]
_SCOPES: Final = [
    _a("posting with scope read", *_LACKS, _post("/api/v1/chats/site-1/messages", "read", MESSAGE)),
    _a(
        "waiting for the turn of a message with scope post",
        *_LACKS,
        _post("/api/v1/chats/site-1/messages?wait=1", "post", MESSAGE),
    ),
    _a("reading with scope post", *_LACKS, _get("/api/v1/chats/site-1/messages", "post")),
    _a("reading events with scope post", *_LACKS, _get("/api/v1/chats/site-1/events", "post")),
    _a("resetting with scope read", *_LACKS, _post("/api/v1/chats/site-1/reset", "read", {})),
    _a(
        "calling with scope read",
        *_LACKS,
        _post("/api/v1/calls", "read", {"method": "x", "chat_key": "site-1"}),
    ),
    _a(
        "running code with scope call",
        *_LACKS,
        _post("/api/v1/runs", "call", {"code": "1", "chat_key": "site-1"}),
    ),
    _a(
        "a decision on a call with scope call",
        *_LACKS,
        _post("/api/v1/approvals/{approval}/decision", "call", {"decision": "approve"}),
    ),
    _a(
        "a decision on a call with scope admin",
        *_LACKS,
        _post("/api/v1/approvals/{approval}/decision", "admin", {"decision": "approve"}),
    ),
    _a(
        "revoking an approval with scope read",
        *_LACKS,
        _post("/api/v1/approvals/{approval}/revoke", "read", {}),
    ),
    _a("approvals with scope call", *_LACKS, _get("/api/v1/approvals?chat_key=site-1", "call")),
    _a("all approvals, by a key of some chats", *_LIMITED, _get("/api/v1/approvals", "some")),
    _a("listing methods with scope read", *_LACKS, _get("/api/v1/methods", "read")),
    _a("listing keys with scope run", *_LACKS, _get("/api/v1/keys", "run")),
    _a("metrics with scope read", *_LACKS, _get("/metrics", "read")),
    _a("the audit with scope post", *_LACKS, _get("/api/v1/audit", "post")),
    _a(
        "a key with more scopes than its creator",
        *_LACKS,
        _post("/api/v1/keys", "admin", {"name": "x", "scopes": ["run"]}),
    ),
    _a(
        "a key for all chats, by an admin of some chats",
        *_LIMITED,
        _post("/api/v1/keys", "some", {"name": "x", "scopes": ["read"]}),
    ),
    _a(
        "a key for all users, by an admin of one user",
        *_LIMITED,
        _post("/api/v1/keys", "bob", {"name": "x", "scopes": ["read"]}),
    ),
    _a(
        "a key with a higher budget than its creator's",
        403,
        "key_limited",
        _post("/api/v1/keys", "limited", {"name": "x", "scopes": ["read"], "tokens_per_day": 1001}),
    ),
    _a(
        "a key without the limit of its creator",
        403,
        "key_limited",
        _post("/api/v1/keys", "limited", {"name": "x", "scopes": ["read"]}),
    ),
    _a("an unknown scope", *_BAD, _post("/api/v1/keys", "all", {"name": "x", "scopes": ["root"]})),
    _a("revoking a key, by an admin of some chats", *_LIMITED, _delete("/api/v1/keys/{key}", "some")),
    _a("all jobs, by an admin of some chats", *_LIMITED, _get("/api/v1/jobs", "some")),
    _a("all timers, by an admin of some chats", *_LIMITED, _get("/api/v1/timers", "some")),
    _a("a configuration, by an admin of some chats", *_LIMITED, _get("/api/v1/plugins/x/config", "some")),
    _a(
        "disabling a plugin, by an admin of some chats",
        *_LIMITED,
        _post("/api/v1/plugins/x/disable", "some", {}),
    ),
    _a("the lane of a method, by an admin of some chats", *_LIMITED, _put("/api/v1/lanes/x", "some", LANE)),
    _a("the lane of a method with scope call", *_LACKS, _put("/api/v1/lanes/x", "call", LANE)),
    _a("removing a lane, by an admin of one user", *_LIMITED, _delete("/api/v1/lanes/x", "bob")),
    _a("the state of the catalogue with scope read", *_LACKS, _get("/api/v1/catalogue", "read")),
    _a(
        "a file's description with scope post", *_LACKS, _get("/api/v1/chats/site-1/file-info?path=x", "post")
    ),
    _a(
        "a file outside of the uploads with scope post",
        *_LACKS,
        _put("/api/v1/chats/site-1/files/x.txt?path=shared/x.txt", "post", b"x"),
    ),
    _a("plugins of a chat with scope post", *_LACKS, _get("/api/v1/chats/site-1/plugins", "post")),
    _a("waking a plugin with scope post", *_LACKS, _put("/api/v1/chats/site-1/plugins/x", "post", AWAKE)),
    _a(
        "answering a question of an MCP server, by an admin of some chats",
        *_LIMITED,
        _post("/api/v1/mcp/questions/x-0/answer", "some", {"action": "decline"}),
    ),
    _a("dead letters, by an admin of some chats", *_LIMITED, _get("/api/v1/dead-letters", "some")),
    _a(
        "posting as another user than the key's",
        403,
        "user_not_allowed",
        _post("/api/v1/chats/site-1/messages", "bob", MESSAGE),
    ),
    _a(
        "calling as another user than the key's",
        403,
        "user_not_allowed",
        _post("/api/v1/calls", "bob", {"method": "x", "chat_key": "site-1", "user_id": "ada"}),
    ),
]
_CHATS: Final = [
    _a("another chat's messages", *_NONE, _get("/api/v1/chats/secret/messages", "some")),
    _a("another chat's summaries", *_NONE, _get("/api/v1/chats/secret/summaries", "some")),
    _a("a file's description in another chat", *_NONE, _get("/api/v1/chats/secret/file-info?path=x", "some")),
    _a("another chat's plugins", *_NONE, _get("/api/v1/chats/secret/plugins", "some")),
    _a("waking a plugin in another chat", *_NONE, _put("/api/v1/chats/secret/plugins/x", "some", AWAKE)),
    _a("another chat's events", *_NONE, _get("/api/v1/chats/secret/events?after=0", "some")),
    _a("another chat's turn", *_NONE, _get("/api/v1/turns/{turn}", "some")),
    _a("cancelling another chat's turn", *_NONE, _post("/api/v1/turns/{turn}/cancel", "some", {})),
    _a("posting to another chat", *_NONE, _post("/api/v1/chats/secret/messages", "some", MESSAGE)),
    _a("resetting another chat", *_NONE, _post("/api/v1/chats/secret/reset", "some", {})),
    _a(
        "a call in another chat",
        *_NONE,
        _post("/api/v1/calls", "some", {"method": "x", "chat_key": "secret"}),
    ),
    _a("a run in another chat", *_NONE, _post("/api/v1/runs", "some", {"code": "1", "chat_key": "secret"})),
    _a("another chat's job", *_NONE, _get("/api/v1/jobs/{job}", "some")),
    _a("cancelling another chat's job", *_NONE, _post("/api/v1/jobs/{job}/cancel", "some", {})),
    _a(
        "a signal to another chat's job",
        *_NONE,
        _post("/api/v1/jobs/{job}/signals", "some", {"key": "go"}),
    ),
    _a("another chat's jobs by query", *_NONE, _get("/api/v1/jobs?chat_key=secret", "some")),
    _a("another chat's approval", *_NONE, _get("/api/v1/approvals/{approval}", "some")),
    _a("another chat's approvals by query", *_NONE, _get("/api/v1/approvals?chat_key=secret", "some")),
    _a("a decision on another chat's call", *_NONE, _post("/api/v1/approvals/{approval}/decision", "some", {"decision": "approve"})),
    _a("revoking another chat's approval", *_NONE, _post("/api/v1/approvals/{approval}/revoke", "some", {})),
    _a("deleting another chat's timer", *_NONE, _delete("/api/v1/timers/{timer}", "some")),
    _a("cancelling another chat's rounds", *_NONE, _post("/api/v1/chats/secret/cancel", "some", {})),
    _a("another chat's files", *_NONE, _get("/api/v1/chats/secret/files", "some")),
    _a("another chat's file", *_NONE, _get("/api/v1/chats/secret/files/{file}", "some")),
    _a("another chat's file by a chat of one's own", *_NONE, _get("/api/v1/chats/site-1/files/{file}", "some")),
    _a("deleting another chat's file", *_NONE, _delete("/api/v1/chats/secret/files/{file}", "some")),
    _a("deleting another chat's file by a chat of one's own", *_NONE, _delete("/api/v1/chats/site-1/files/{file}", "some")),
    _a("a file for another chat", *_NONE, lambda w: request_bytes("PUT", "/api/v1/chats/secret/files/a", w.bearer("some"), b"x")),
    _a("files for another chat", *_NONE, lambda w: request_bytes("POST", "/api/v1/chats/secret/files", w.bearer("some", **{"Content-Type": _FORM}), _part("a", b"x") + _END)),
    _a("another chat's file as a part of a message", 422, "invalid_part", lambda w: request_bytes("POST", "/api/v1/chats/site-1/messages", w.bearer("some"), {"user_id": "a", "parts": [{"type": "file", "file_id": w.ids["file"]}]})),
    _a("changing another chat's timer", *_NONE, lambda w: request_bytes("PATCH", f"/api/v1/timers/{w.ids['timer']}", w.bearer("some"), {"state": "paused"})),
    _a("another chat's timers by query", *_NONE, _get("/api/v1/timers?chat_key=secret", "some")),
    _a("a completion in another chat", *_NONE, _post("/v1/chat/completions", "some", {"model": "nekro", "messages": [{"role": "user", "content": "a"}]}, **{"X-Nekro-Chat": "secret"})),
    _a("a response of another key", *_NONE, _get("/v1/responses/{response}", "some")),
    _a("the events of a response of another key", *_NONE, _get("/v1/responses/{response}?stream=true", "some")),
    _a("cancelling a response of another key", *_NONE, _post("/v1/responses/{response}/cancel", "some", {})),
    _a("deleting a response of another key", *_NONE, _delete("/v1/responses/{response}", "some")),
    _a("continuing a response of another key", *_NONE, _post("/v1/responses", "some", {"model": "nekro", "input": "a", "previous_response_id": "resp"})),
    _a("a question to the client of another chat", *_NONE, _post("/api/v1/adapters/sse/requests", "some", {"channel_id": "x", "request": "get_self_info", "data": {}})),
    _a("a subscription to the events of all chats", *_LIMITED, _post("/api/v1/webhooks", "some", {"url": "https://example.com/"})),
    _a("the subscriptions to all chats", *_LIMITED, _get("/api/v1/webhooks", "some")),
    _a("turning a subscription to another URL", *_LIMITED, lambda w: request_bytes("PATCH", "/api/v1/webhooks/x", w.bearer("some"), {"url": "https://example.com/"})),
    _a("the secret of a subscription", *_LIMITED, _post("/api/v1/webhooks/x/secret", "some", {})),
    _a("the deliveries of a subscription", *_LIMITED, _get("/api/v1/webhooks/x/deliveries", "some")),
    _a("an encoded way up: site-1%2F..%2Fsecret", *_NONE, _get("/api/v1/chats/site-1%2F..%2Fsecret/messages", "some")),
    _a("a way up: site-1/../secret", *_NONE, _get("/api/v1/chats/site-1/../secret/messages", "some")),
    _a("an encoded slash that ends the key: secret%2Fmessages%3F", *_NONE, _get("/api/v1/chats/secret%2Fmessages%3F/messages", "some")),
    _a("a pattern as chat key: %2A", *_NONE, _get("/api/v1/chats/%2A/messages", "some")),
    _a("another case: SITE-1", *_NONE, _get("/api/v1/chats/SITE-1/messages", "some")),
    _a("a line break before an allowed key", *_NONE, _get("/api/v1/chats/secret%0Asite-1/messages", "some")),
    _a("a doubly encoded slash", *_NONE, _get("/api/v1/chats/secret%252F/messages", "some")),
]  # fmt: skip
_PATHS: Final = [
    _a("dot segments", 404, "not_found", _get("/api/v1/x/../keys", "all")),
    _a("a doubled slash", 404, "not_found", _get("//api/v1/keys", "all")),
    _a("a slash at the end: no redirect", 404, "not_found", _get("/api/v1/keys/", "all")),
    _a("encoded slashes in the fixed part", 404, "not_found", _get("/api%2Fv1%2Fkeys", "all")),
    _a("capitals in the path", 404, "not_found", _get("/API/V1/KEYS", "all")),
    _a("an absolute URL as target", 404, "not_found", _get("http://localhost/api/v1/keys", "all")),
    _a("a path that is not UTF-8", 400, "path_invalid", _get("/api/v1/chats/%FF/messages", "all")),
    _a("the noncharacter that stands for a slash", 400, "path_invalid", _get("/api/v1/chats/a%EF%B7%AFb/messages", "all")),
    _a("a chat key of blanks", *_BAD, _get("/api/v1/chats/%20/messages", "all")),
    _a("NUL in a chat key", *_NONE, _get("/api/v1/chats/%00/messages", "all")),
    _a("a chat key of 4,000 bytes", 422, "invalid_value", _post(f"/api/v1/chats/{'k' * 4000}/messages", "all", MESSAGE)),
    _a("method TRACE", 405, "method_not_allowed", lambda w: request_bytes("TRACE", "/api/v1/keys", w.bearer("all"))),
    _a("the server's own documentation pages", 404, "not_found", _get("/docs", "all")),
    _a("two lengths of the body", 400, "http_invalid", lambda w: request_bytes("POST", "/api/v1/calls", [*w.bearer("all").items(), ("Content-Length", "2"), ("Content-Length", "20")], b"{}")),
    _a("a length of the body beside Transfer-Encoding", 400, "length_ambiguous", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Content-Length": "5", "Transfer-Encoding": "chunked"}), b"0\r\n\r\n")),
    _a("the same to the MCP endpoint", 400, "length_ambiguous", lambda w: request_bytes("POST", "/mcp", w.bearer("all", **{"Content-Length": "5", "Transfer-Encoding": "chunked"}), b"0\r\n\r\n")),
    _a("chunks in HTTP/1.0", 400, "length_ambiguous", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Transfer-Encoding": "chunked"}), b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")),
    _a("a negative length of the body", 400, "http_invalid", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Content-Length": "-1"}), b"{}")),
    _a("a folded header", 401, "key_missing", lambda w: b"GET /api/v1/keys HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\nConnection: close\r\n\r\n"),
    _a("a blank before the colon of a header", 400, "http_invalid", lambda w: b"GET /api/v1/keys HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n"),
    _a("a header of 100,000 bytes", 431, "headers_too_large", lambda w: request_bytes("GET", "/api/v1/keys", w.bearer("all", X="a" * 100_000))),
    _a("no HTTP at all", 400, "http_invalid", lambda w: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
]  # fmt: skip
_BODIES: Final = [
    _a("a declared body over the limit", 413, "body_too_large", _post("/api/v1/calls", "all", b"", **{"Content-Length": "99999999999"})),
    _a("a body in chunks over the limit", 413, "body_too_large", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Transfer-Encoding": "chunked"}), b"%x\r\n" % 2_100_000 + b"a" * 2_100_000 + b"\r\n0\r\n\r\n")),
    _a("text that is no JSON", 400, "invalid_request", _post("/api/v1/calls", "all", b"{")),
    _a("JSON nested 100,000 deep", 400, "bad_request", _post("/api/v1/calls", "all", b"[" * 100_000)),
    _a("arguments nested 200 deep", *_BAD, _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c","args":[' + b"[" * 200 + b"]" * 200 + b"]}")),
    _a("NaN", *_BAD, _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c","args":[NaN]}')),
    _a("a number of 10,000 digits", 400, "bad_request", _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c","args":[' + b"9" * 10_000 + b"]}")),
    _a("a lone surrogate as text: kept as it is", 202, "", _post("/api/v1/chats/site-1/messages", "all", b'{"text":"\\ud800","user_id":"a"}')),
    _a("a lone surrogate as a name", *_BAD, _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c","\\ud800":1}')),
    _a("an unknown field", *_BAD, _post("/api/v1/chats/site-1/messages", "all", {**MESSAGE, "is_admin": True})),
    _a("a list in place of an object", *_BAD, _post("/api/v1/calls", "all", [])),
    _a("a form of a web page", *_BAD, _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c"}', **{"Content-Type": "text/plain"})),
    _a("a decision that states who makes it", *_BAD, _post("/api/v1/approvals/{approval}/decision", "all", {"decision": "approve", "by": "shell:root"})),
    _a("a decision for ever", *_BAD, _post("/api/v1/approvals/{approval}/decision", "all", {"decision": "approve", "scope": "always"})),
    _a("a denial with other arguments", 422, "invalid_value", _post("/api/v1/approvals/{approval}/decision", "all", {"decision": "deny", "args": []})),
    _a("approving a request whose call is not recorded", 409, "message_refused", _post("/api/v1/approvals/{approval}/decision", "all", {"decision": "approve"})),
    _a("an empty message", *_BAD, _post("/api/v1/chats/site-1/messages", "all", {"text": " ", "user_id": "a"})),
    _a("an endless time limit", *_BAD, _post("/api/v1/calls", "all", b'{"method":"x","chat_key":"c","timeout_seconds":1e999}')),
    _a("a wait of a year", *_BAD, _post("/api/v1/chats/site-1/messages?wait=31536000", "all", MESSAGE)),
    _a("a page of 10^9 items", *_BAD, _get("/api/v1/audit?limit=1000000000", "all")),
    _a("a cursor with SQL", 422, "cursor_invalid", _get("/api/v1/audit?cursor=MSBPUiAxPTE", "all")),
    _a("a cursor over 64 bits", 422, "cursor_invalid", _get("/api/v1/approvals?cursor=" + cursor_of("9" * 30), "all")),
    _a("a cursor that is none", 422, "cursor_invalid", _get("/api/v1/audit?cursor=%FF", "all")),
    _a("an event number over 64 bits", *_BAD, _get("/api/v1/chats/site-1/events?after=99999999999999999999", "all")),
    _a("a cursor over 64 bits", 422, "cursor_invalid", _get("/api/v1/approvals?cursor=OTk5OTk5OTk5OTk5OTk5OTk5OTk", "all")),
    _a("a method's name of 100,000 characters", *_BAD, _post("/api/v1/calls", "all", {"method": "a." * 50_000, "chat_key": "c"})),
    _a("a message of 300,000 characters", 422, "invalid_value", _post("/api/v1/chats/site-1/messages", "all", {"text": "a" * 300_000, "user_id": "a"})),
    _a("a user's name of 1,000 characters", 422, "invalid_value", _post("/api/v1/chats/site-1/messages", "all", {**MESSAGE, "user_name": "a" * 1000})),
    _a("a message of 65 parts", *_BAD, _post("/api/v1/chats/site-1/messages", "all", {"user_id": "a", "parts": [{"type": "text", "text": "a"}] * 65})),
    _a("a message of a million parts", 413, "request_entity_too_large", _post("/api/v1/chats/site-1/messages", "all", b'{"user_id":"a","parts":[' + b"{}," * 1_000_000 + b"{}]}")),
    _a("a completion of a million messages", 413, "request_entity_too_large", _post("/v1/chat/completions", "all", b'{"model":"nekro","messages":[' + b"[]," * 1_000_000 + b"[]]}")),
    _a("an Idempotency-Key of 300 characters", 400, "idempotency_key_invalid", _post("/api/v1/calls", "all", {"method": "x", "chat_key": "c"}, **{"Idempotency-Key": "k" * 300})),
    _a("another body under a used Idempotency-Key", 422, "idempotency_key_reused", _post("/api/v1/chats/site-1/messages", "all", {**MESSAGE, "text": "other"}, **{"Idempotency-Key": "used"})),
    _a("the Idempotency-Key of another key: no answer of it", 404, "method_not_found", _post("/api/v1/calls", "call", {"method": "nothing", "chat_key": "c"}, **{"Idempotency-Key": "used"})),
    _a("a used Idempotency-Key for a new key", 422, "idempotency_key_reused", _post("/api/v1/keys", "all", {"name": "y", "scopes": ["admin"]}, **{"Idempotency-Key": "used-for-keys"})),
    _a("a body that ends early: closed", 0, "", _post("/api/v1/calls", "all", b"{", **{"Content-Length": "100"}), ends=True),
]  # fmt: skip

_ONE: Final = _part("a", b"x")
_FORMS: Final = [
    _a("33 files", *_REFUSED, _form(*[_ONE] * 33, _END)),
    _a("10,000 files", *_REFUSED, _form(_ONE * 10_000, _END)),
    _a("5,000 fields", *_REFUSED, _form(_part("a", b"x", file=False) * 5_000, _END)),
    _a("a field of 2 MB", *_REFUSED, _form(_part("a", b"x" * 2_000_000, file=False), _END)),
    _a("100,000 empty boundaries", *_REFUSED, _form(b"--b\r\n" * 100_000, _END)),
    _a("a part with a header of 1 MB", *_REFUSED, _form(_part("a", b"x", "X: " + "x" * (1 << 20)), _END)),
    _a("a part with 10,000 headers", *_REFUSED, _form(_part("a", b"x", *["X: x"] * 10_000), _END)),
    _a("a header of a part without an end", *_REFUSED, _form(b"--b\r\nContent-Disposition: form-data" + b"x" * (1 << 20))),
    _a("a part without headers", *_REFUSED, _form(b"--b\r\n\r\nx\r\n", _END)),
    _a("a part without a name", *_REFUSED, _form(b'--b\r\nContent-Disposition: form-data; filename="a"\r\n\r\nx\r\n', _END)),
    _a("no last boundary", *_REFUSED, _form(_ONE)),
    _a("no boundary in the header", *_REFUSED, _form(_ONE, _END, kind="multipart/form-data")),
    _a("a boundary of 10,000 characters", *_REFUSED, _form(_ONE, _END, kind="multipart/form-data; boundary=" + "b" * 10_000)),
    _a("another boundary than the header's", *_REFUSED, _form(_ONE, _END, kind="multipart/form-data; boundary=c")),
    _a("forms nested 1,000 deep: the content of one file", 201, "", _form(_part("a", b"".join(b"--c%d\r\nContent-Type: multipart/mixed; boundary=c%d\r\n\r\n" % (n, n + 1) for n in range(1_000)), "Content-Type: multipart/mixed; boundary=c0"), _END)),
    _a("a part that states another length: its boundary counts", 201, "", _form(_part("a", b"x", "Content-Length: 99999999999"), _END)),
    _a("a part that states a negative length: its boundary counts", 201, "", _form(_part("a", b"x", "Content-Length: -1"), _END)),
    _a("a part in Base64: stored as it is", 201, "", _form(_part("a", b"eA==", "Content-Transfer-Encoding: base64"), _END)),
    _a("a file name that leads out of the chat: its last component", 201, "", _form(b'--b\r\nContent-Disposition: form-data; name="a"; filename="../../../x"\r\n\r\nx\r\n', _END)),
    _a("a message whose fields occur twice", *_BAD, _form(*[_part("text", b"x", file=False)] * 2, _END, path="/api/v1/chats/site-1/messages")),
    _a("a bomb in gzip", 415, "content_encoding_unsupported", _encoded("gzip", gzip.compress(bytes(10 << 20)))),
    _a("a bomb in gzip as a file", 415, "content_encoding_unsupported", _encoded("gzip", gzip.compress(bytes(10 << 20)), "/api/v1/chats/site-1/files")),
    _a("a body in deflate, br and zstd", 415, "content_encoding_unsupported", _encoded("deflate, br, zstd", b"x")),
    _a("a body in gzip by Transfer-Encoding", 400, "http_invalid", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Transfer-Encoding": "gzip, chunked"}), b"0\r\n\r\n")),
]  # fmt: skip

#: On a gateway that has keys.
_PING: Final = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
_ANY: Final = "application/json, text/event-stream"


def _mcp(key: str, body: Any = _PING, **headers: str) -> Callable[[World], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _post("/mcp", key, body, **{"Accept": _ANY, **named})


_MCP: Final = [
    _a("MCP without a key", *_MISSING, lambda w: request_bytes("POST", "/mcp", {"Accept": _ANY}, _PING)),
    _a("MCP with a key that may only post", *_LACKS, _mcp("post")),
    _a("MCP in another chat", 404, "not_found", _mcp("some", X_Nekro_Chat="secret")),
    _a("MCP in the name of another user", 403, "user_not_allowed", _mcp("bob", X_Nekro_User="ada")),
    _a("MCP by a web site that has a key", 403, "cross_site", _mcp("all", Origin="https://evil.example")),
    _a("an invented MCP session", 404, "not_found", _mcp("all", Mcp_Session_Id="0" * 96)),
    _a("a protocol version that does not exist", 400, "-32602", _mcp("all", Mcp_Protocol_Version="1999-01-01")),
    _a("a stream of an MCP session", 405, "method_not_allowed", _get("/mcp", "all", Accept=_ANY)),
    _a("an MCP message that is no JSON", 400, "-32700", _mcp("all", b"{")),
    _a("an MCP message with 100,000 levels", 400, "-32700", _mcp("all", b"[" * 100_000)),
    _a("many MCP messages as one", 400, "-32602", _mcp("all", [_PING, _PING])),
    _a("an MCP message as a form", 400, "", _mcp("all", b"a=b", Content_Type="application/x-www-form-urlencoded")),
    _a("an MCP client that takes pages only", 406, "-32600", _mcp("all", Accept="text/html")),
]  # fmt: skip
KEYED: Final = {
    "Keys": _KEYS,
    "Scopes": _SCOPES,
    "Other chats": _CHATS,
    "Paths and headers": _PATHS,
    "Bodies": _BODIES,
    "Forms and encodings": _FORMS,
    "MCP": _MCP,
}


def _site(method: str, path: str, body: Any = None, **headers: str) -> Callable[[World], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda w: request_bytes(method, path, named, body)


_CROSS: Final = (403, "cross_site")
_HOST: Final = (421, "host_not_allowed")
#: On a loopback port, which every user of the machine and every page in its browsers reaches.
LOCAL: Final = {
    "Web sites and other users of the machine": [
        _a("a request of another user, without a key", *_MISSING, _site("GET", "/api/v1/keys")),
        _a("the form of a ticket that needs no key", 401, "ticket_invalid", _site("GET", "/api/v1/changes?ticket=nt_local_9999999999_" + "0" * 64)),
        _a("an invented link to the console", 401, "link_invalid", lambda w: request_bytes("POST", "/console/session", {"Host": "localhost", "Origin": "http://localhost"}, {"key": "nl_" + "0" * 16 + "_9999999999_" + "0" * 32 + "_" + "0" * 64})),
        _a("DNS rebinding: the name of a web site", *_HOST, _site("GET", "/api/v1/keys", Host="evil.example")),
        _a("a name that begins like this machine's", *_HOST, _site("GET", "/api/v1/keys", Host="localhost.evil.example")),
        _a("a name with a user part", *_HOST, _site("GET", "/api/v1/keys", Host="localhost@evil.example")),
        _a("two names", 400, "http_invalid", lambda w: request_bytes("GET", "/api/v1/keys", [("Host", "localhost"), ("Host", "evil.example")])),
        _a("a POST of another origin", *_CROSS, _site("POST", "/api/v1/keys", {"name": "x", "scopes": ["admin"]}, Origin="https://evil.example")),
        _a("a POST of origin null (a sandboxed frame)", *_CROSS, _site("POST", "/api/v1/keys", {}, Origin="null")),
        _a("a POST of another port of this machine", *_CROSS, _site("POST", "/api/v1/keys", {}, Origin="http://localhost:3000")),
        _a("a form of another site", *_CROSS, _site("POST", "/api/v1/calls", b"a=b", Content_Type="application/x-www-form-urlencoded", Sec_Fetch_Site="cross-site")),
        _a("a request of a sibling site", *_CROSS, _site("GET", "/api/v1/keys", Sec_Fetch_Site="same-site")),
        _a("a picture of another site", *_CROSS, _site("GET", "/api/v1/keys", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")),
        _a("a preflight of another origin: no permission", 405, "method_not_allowed", _site("OPTIONS", "/api/v1/keys", Origin="https://evil.example", Access_Control_Request_Method="POST")),
        _a("a request that passed a proxy (X-Forwarded-For)", *_MISSING, _site("GET", "/api/v1/keys", X_Forwarded_For="203.0.113.9")),
        _a("a request that passed a proxy (Forwarded)", *_MISSING, _site("GET", "/api/v1/keys", Forwarded="for=203.0.113.9")),
        _a("a request that passed a proxy (Via)", *_MISSING, _site("GET", "/api/v1/keys", Via="1.1 proxy")),
        _a("a WebSocket", 404, "not_found", _site("GET", "/api/v1/ws", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Version="13", Sec_WebSocket_Key="AAAAAAAAAAAAAAAAAAAAAA==")),
    ]
}  # fmt: skip

#: On a gateway whose time limits are short; the client keeps its connection open and sends no more.
LIMITED: Final = {
    "Slow clients": [
        _a("headers that never end", 408, "headers_too_slow", lambda w: b"GET /api/v1/keys HTTP/1.1\r\nHost: localhost\r\nX: "),
        _a("a connection without a request", 408, "headers_too_slow", lambda w: b""),
        _a("half a body", 408, "body_too_slow", _post("/api/v1/calls", "all", b"{", **{"Content-Length": "100"})),
        _a("chunks without an end", 408, "body_too_slow", lambda w: request_bytes("POST", "/api/v1/calls", w.bearer("all", **{"Transfer-Encoding": "chunked"}), b"1\r\n{\r\n")),
        _a("the head of a large body without a key", *_MISSING, lambda w: request_bytes("POST", "/v1/chat/completions", {"Content-Length": "40000000"}, b"")),
        _a("the head of a body of the API without a key", *_MISSING, lambda w: request_bytes("POST", "/api/v1/calls", {"Content-Length": "2000000"}, b"")),
        _a("a request without headers", 408, "headers_too_slow", lambda w: b"POST /api/v1/calls HTTP/1.1\r\n"),
    ]
}  # fmt: skip


#: Attempts that are more than one request: what is tried, what it gets, and where.
OTHERS: Final = (
    ("a wrong key, to measure how far it is right", "the same lookup and one comparison of digests, whatever is wrong", "test_gateway_keys.py"),
    ("more streams of one key, of any kind, than `streams_per_key`", "429 `too_many_streams`", "test_gateway_stream_limits.py"),
    ("more streams of one address, or one IPv6 network, than `streams_per_address`", "429 `too_many_streams`", "test_gateway_stream_limits.py"),
    ("20 streams at the same moment with a limit of 3", "3 streams, 17 times 429", "test_gateway_stream_limits.py"),
    ("requests over the rate while Redis does not answer", "429 `rate_exceeded`, counted by each gateway", "test_gateway_keys.py"),
    ("turns over the budget by messages, completions, responses and runs", "429 `budget_exceeded`", "test_gateway_keys.py"),
    ("29 files with scripts (HTML, XHTML, SVG, PDF, polyglots, texts to be sniffed) opened in Chromium", "saved; pictures are shown, and nothing runs", "test_gateway_active_content.py"),
    ("the same files in frames, objects, pictures, style sheets and scripts of a foreign page", "nothing runs in the API's origin", "test_gateway_active_content.py"),
    ("HTML in paths, quoted by problem documents, opened in Chromium", "a document without origin, nothing runs", "test_gateway_active_content.py"),
    ("the secret of a new key or webhook in the stored answer of its request", "not there", "test_gateway_idempotency.py"),
    ("a decision that was made before, or two at once", "409 `already_decided`, which names the one that holds", "test_gateway_approvals.py"),
    ("`/approve` by a person who may not decide", "a message in the chat; nothing is approved", "test_gateway_approvals.py"),
    ("a slow reader of events", "its stream ends, others go on", "test_gateway_events.py"),
    ("an MCP session of another key", "404 `not_found`", "test_mcp_server.py"),
    ("methods, code, prompts, histories and jobs over MCP without the scope; histories and files of other chats", "an error; none of them is listed", "test_mcp_server.py"),
    ("more MCP streams of one key than `streams_per_key`", "an error with `too_many_streams`", "test_mcp_server.py"),
    ("a call over MCP that requires approval, by a key without the scope `approve`", "it waits for a person", "test_mcp_server.py"),
    ("as many faults as a body can have, to any route and to the login of the console", "an error that counts them", "test_gateway_costly_requests.py"),
    ("tens of thousands of messages of the user, or parts of one, in a completion", "400 `invalid_value`", "test_gateway_costly_requests.py"),
    ("an MCP subscription whose key is revoked", "it ends", "test_mcp_server.py"),
    ("more than 1,000 characters of words to look for in the methods, over MCP", "an error", "test_mcp_server.py"),
    ("a long body that arrives a few bytes at a time", "408 `body_too_slow`", "test_gateway_attacks.py"),
    ("a client that takes nothing of a file, a list or the answers to many requests", "its connection is reset", "test_gateway_attacks.py"),
    ("a webhook that needs a key, without one and without its body", "401 `key_invalid`", "test_plugin_http.py"),
    ("a stream of a completion or response whose key is revoked", "it ends; the turn goes on", "test_gateway_stream_limits.py"),
    ("metadata, a user or a conversation of megabytes in a response", "400 `invalid_request`; what is stored has the sizes of the protocol", "test_gateway_costly_requests.py"),
    ("more than 256 MiB of long bodies of one key at the same time", "503 `overloaded`; other keys and short bodies are served", "test_gateway_attacks.py"),
    ("cursors of a list of chats, decoded by a key of some chats", "they name no chat that it does not have", "test_gateway_lists.py"),
    ("the turn in the answer to its cancellation, by a key that may not read", "its state and times only", "test_gateway_events.py"),
    ("calls and runs whose methods ask models, by a key whose budget is used up", "429 `budget_exceeded`; what they ask is on the budget of the key", "test_gateway_paying_keys.py"),
    ("webhook URLs of private addresses, also by DNS and redirects", "422 or no delivery", "test_outgoing_webhooks.py"),
)  # fmt: skip


def page() -> str:
    """Return the page that lists the attempts."""
    lines = [
        "# Attempts against the gateway",
        "",
        "Requests that `tests/gateway/test_gateway_attacks.py` sends to real gateways as raw bytes, and what each"
        " gets: the HTTP status and the `code` of the problem document. No code: the answer is that of the HTTP"
        " parser. The test compares this page with its table.",
    ]
    for title, attempts in {**KEYED, **LOCAL, **LIMITED}.items():
        lines += ["", f"## {title}", "", "| attempt | gets |", "|---|---|"]
        for attempt in attempts:
            status, code = attempt.gets
            lines.append(f"| {attempt.text} | {status}{f' `{code}`' if code else ''} |")
    lines += [
        "",
        "## More than one request",
        "",
        "| attempt | gets | test in `tests/gateway` |",
        "|---|---|---|",
    ]
    lines += [f"| {text} | {gets} | `{test}` |" for text, gets, test in OTHERS]
    return "\n".join(lines) + "\n"
