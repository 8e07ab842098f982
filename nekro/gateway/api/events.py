"""The event stream of a chat, as server-sent events."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request
from sse_starlette import EventSourceResponse

from nekro.gateway.dependencies import ChatKey, HubDep, IdentityDep, take_stream
from nekro.gateway.identity import Scope
from nekro.gateway.problems import ProblemError
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.streams.answer import StreamAnswer
from nekro.gateway.streams.events import Position, lost_frame
from nekro.gateway.streams.hub import EventsLostError
from nekro_client.models import EventType

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["events"])

#: A number that fits the database's column.
_MOST_NUMBER: Final = (1 << 63) - 1
_ID: Final = re.compile(r"([0-9]{1,20})(?:\.([0-9a-f]{8}))?", re.ASCII)


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
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    ticket: Annotated[str | None, Query(description="A stream ticket, in the place of a key.")] = None,
) -> EventSourceResponse:
    """Stream a chat's events: first those after the given number, then new ones as they happen.

    `id:` names a kept event, by its number and a mark; live events have none. A client that connects again
    with `Last-Event-ID` gets every kept event once and in order. The server ends the stream of a reader that
    does not take its events. The event `events.lost` says that the database has lost the events after
    `data.after`; the stream ends with it, and goes on there when the client connects again. A browser takes
    the URL from `POST /stream-tickets`.
    """
    identity.require(Scope.READ, chat_key=chat_key)
    wanted = _types(types)
    # A browser that connects again sends the header, and the URL's number is older.
    position = _position(last_event_id)
    if position is None and after is not None:
        position = Position(after)
    hub.require_room()
    take_stream(request, identity)
    # An outage of the database is an error, not an empty stream.
    newest = await hub.newest(chat_key, after=None if position is None else position.number)
    try:
        begin = newest if position is None else await hub.checked(chat_key, position, newest)
    except EventsLostError as exc:
        return EventSourceResponse(iter([lost_frame(chat_key, exc.after)]))
    stream = hub.stream(chat_key, after=begin.number, types=wanted, with_live=live, owner=identity)
    return StreamAnswer(chat_key, stream, begin)


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


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    match = _ID.fullmatch(text)
    if match is None or int(match[1]) > _MOST_NUMBER:
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_request",
            f"Last-Event-ID: {text!r} is not the id of an event; send the `id` of the last event",
        )
    return Position(int(match[1]), match[2])
