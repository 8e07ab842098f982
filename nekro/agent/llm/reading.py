"""Reads what endpoints send for one request: server-sent events, or one JSON value.

Endpoints deviate from their protocols: each value may have any type, events may be heartbeats of any form,
and an error may come with status 200. What can be understood is used; an answer without an end is no answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Callable
from typing import Any, Final

from nekro.agent.llm.faults import error_in, fault_of_error
from nekro.agent.llm.gathered import Gathered, unreadable
from nekro.agent.llm.protocols import ChatProtocol
from nekro.agent.llm.retry import Fault, TryFailed
from nekro_agent.errors import LLMUnreadableError
from nekro_client.sse import EventParser

__all__ = ["read_answer"]

#: Most bytes that may carry an answer: far above what models write.
_MOST_BYTES: Final = 64 << 20
_END: Final = "[DONE]"
#: What may stand before a JSON value or the first event.
_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


async def read_answer(
    chunks: AsyncIterable[bytes],
    gathered: Gathered,
    protocol: ChatProtocol,
    *,
    kind: str,
    on_sign: Callable[[], None],
) -> None:
    """Read a response with status 200 up to its end, or to the end of the answer in it.

    Whether it is a stream follows from its first bytes: endpoints ignore ``stream``, and name wrong types.

    Args:
        kind: the content type, for errors.
        on_sign: called after each event with text, reasoning or an end; not for heartbeats.

    Raises:
        TryFailed: an error instead of an answer, or something else.
    """
    parser, head, size = EventParser(), b"", 0
    is_stream: bool | None = None
    async for chunk in chunks:
        size += len(chunk)
        if size > _MOST_BYTES:
            raise unreadable(f"the response has more than {_MOST_BYTES} bytes")
        if not is_stream:
            head += chunk
            first = head.lstrip(_BLANK)[:1] if is_stream is None else b""
            if first:
                is_stream = first not in b"{[<"
            if not is_stream:
                continue
            chunk = head
        if _read_events(parser, chunk, gathered, protocol, on_sign):
            return
    if is_stream:
        _read_events(parser, b"\n\n", gathered, protocol, on_sign)  # the last event may lack its end
    else:
        _read_whole(head.lstrip(_BLANK), gathered, protocol, kind)
        on_sign()


def _read_events(
    parser: EventParser,
    chunk: bytes,
    gathered: Gathered,
    protocol: ChatProtocol,
    on_sign: Callable[[], None],
) -> bool:
    """Read the events that a chunk completes; return whether the answer is over."""
    for event in parser.feed(chunk):
        data, is_error = event.data.strip(), event.type == "error"
        if data == _END:
            gathered.finish_reason = gathered.finish_reason or "stop"
            gathered.is_over = True
        elif data.startswith("{"):
            found = _parsed(data, gathered)
            error = error_in(found) or (found if is_error else None)
            if error is not None:
                raise TryFailed(fault_of_error(error, None, gathered.words))
            if protocol.read_event(found, gathered):
                on_sign()
        elif is_error and data:
            raise TryFailed(fault_of_error(data, None, gathered.words))
        # Anything else is a heartbeat.
        if gathered.is_over:
            return True
    return False


def _parsed(data: str, gathered: Gathered) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError) as exc:
        what = f"unreadable answer: {gathered.words(str(exc))}"
        raise TryFailed(Fault(what=what, error=LLMUnreadableError)) from exc
    return found


def _read_whole(body: bytes, gathered: Gathered, protocol: ChatProtocol, kind: str) -> None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise unreadable(f"the response is {kind or 'something'}, not a chat completion") from None
    error = error_in(found)
    if error is not None:
        raise TryFailed(fault_of_error(error, None, gathered.words))
    protocol.read_whole(found, gathered)
    gathered.is_over = True
