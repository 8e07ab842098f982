"""Requests as raw bytes, for what HTTP clients normalise or refuse to send."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

__all__ = ["RawAnswer", "raw", "request_bytes"]


@dataclass(frozen=True, kw_only=True)
class RawAnswer:
    """An answer; status 0: the server closed the connection without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem document, or of an error in OpenAI's or MCP's form; "" for other answers."""
        try:
            found = json.loads(self.body)
            error = found if "code" in found else found["error"]
            problem = error.get("data")
            return str((problem if isinstance(problem, dict) and "code" in problem else error)["code"])
        except (ValueError, LookupError, TypeError):
            return ""


def request_bytes(
    method: str, target: str, headers: dict[str, str] | list[tuple[str, str]] | None = None, body: Any = None
) -> bytes:
    """Return a request; ``body`` that is not bytes is sent as JSON, with its length."""
    listed = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.lower() for name, _ in listed}
    if "host" not in names:
        listed.insert(0, ("Host", "localhost"))
    if body is not None and not names & {"content-length", "transfer-encoding"}:
        listed.append(("Content-Length", str(len(data))))
    if body is not None and "content-type" not in names:
        listed.append(("Content-Type", "application/json"))
    listed.append(("Connection", "close"))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in listed), "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + data


async def raw(port: int, data: bytes, *, ends: bool = False) -> RawAnswer:
    """Send bytes and read the answer until the server closes.

    Args:
        ends: whether to close our half after sending.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        if ends:
            writer.write_eof()
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return RawAnswer(status=0, headers={}, body=answer)
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return RawAnswer(status=int(lines[0].split(" ")[1]), headers=headers, body=body)


def _unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        if not length:
            break
        body, data = body + rest[:length], rest[length + 2 :]
    return body
