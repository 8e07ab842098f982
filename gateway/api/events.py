"""The event stream of a chat, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request
from loguru import logger
from sse_starlette import EventSourceResponse

from gateway.dependencies import ChatKey, HubDep, IdentityDep, take_stream
from gateway.identity import Scope
from gateway.problems import ProblemError
from gateway.streams.events import StreamEvent
from gateway.streams.hub import SlowReaderError
from gateway.web.responses import PING_SECONDS, SEND_SECONDS
from nekro_client.models import EventType

__all__ = ["router"]

router = APIRouter(tags=["events"])

#: After a lost connection browsers wait this long before they connect again.
_RETRY: Final = b"retry: 1000\r\n\r\n"
#: A number that fits the database's column.
_MOST_NUMBER: Final = (1 << 63) - 1


@router.get("/chats/{chat_key}/events", response_class=EventSourceResponse)
async def read_events(
    chat_key: ChatKey,
    request: Request,
    hub: HubDep,
    identity: IdentityDep,
    after: Annotated[
        int | None,
        Query(
            ge=0,
            le=_MOST_NUMBER,
            description="Number of the last event that the reader has; 0 begins with the oldest kept one. "
            "Without it and without `Last-Event-ID` the stream begins with the next event.",
        ),
    ] = None,
    types: Annotated[
        str, Query(description="Types of events, separated by commas; all types without it.", max_length=500)
    ] = "",
    live: Annotated[bool, Query(description="Whether to send events that are not kept.")] = True,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> EventSourceResponse:
    """Stream a chat's events: first those after the given number, then new ones as they happen.

    `id:` is the number of a kept event; live events have none. A client that connects again with
    `Last-Event-ID` gets every kept event once and in order. The server ends the stream of a reader that
    does not take its events.
    """
    identity.require(Scope.READ, chat_key=chat_key)
    wanted = _types(types)
    # A browser that connects again sends the header, and the URL's number is older.
    position = after if last_event_id is None else _number(last_event_id)
    hub.require_room()
    take_stream(request, identity)
    newest = await hub.newest(
        chat_key, after=position
    )  # an outage of the database is an error, not an empty stream
    begin = newest if position is None else position
    stream = hub.stream(chat_key, after=begin, types=wanted, with_live=live)
    return EventSourceResponse(
        _frames(stream, min(begin, newest)), ping=PING_SECONDS, send_timeout=SEND_SECONDS
    )


async def _frames(stream: AsyncGenerator[StreamEvent, None], begin: int) -> AsyncIterator[bytes]:
    # The position of the reader, so that it misses nothing when it loses the connection before an event.
    yield b"id: %d\r\n%s" % (begin, _RETRY)
    try:
        async with aclosing(stream) as events:
            async for event in events:
                yield event.frame
    except SlowReaderError as exc:
        logger.bind(reason=str(exc)).info("event_stream_ended")


def _types(text: str) -> frozenset[str]:
    wanted = frozenset(filter(None, (item.strip() for item in text.split(","))))
    unknown = wanted.difference(EventType)
    if unknown:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_request",
            f"types: unknown {sorted(unknown)}; known: {', '.join(EventType)}",
        )
    return wanted


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > _MOST_NUMBER:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_request",
            f"Last-Event-ID: {text!r} is not the number of an event; send the `id` of the last event",
        )
    return int(text)
