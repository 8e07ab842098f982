"""The event stream of a chat and that of all changes, as server-sent events, and tickets for browsers."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request
from loguru import logger
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from nekro.base.metrics import metrics
from nekro.gateway.access.signed_texts import make_ticket
from nekro.gateway.dependencies import ChatKey, HubDep, IdentityDep, ServicesDep, take_stream
from nekro.gateway.idempotency import NOT_ONCE
from nekro.gateway.streams.change_kinds import kinds_of
from nekro.gateway.streams.changes import Changes
from nekro.gateway.streams.events import Position, StreamEvent, lost_frame
from nekro.gateway.streams.hub import EventsLostError, SlowReaderError
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import EventResponse
from nekro.operations.actor import RefusedError, Scope
from nekro_client.models import EventType, StreamTicket, StreamTicketBody

__all__ = [
    "ChangeAnswer",
    "StreamAnswer",
    "router",
]


#: After a lost connection browsers wait this long before they connect again.
_RETRY: Final = b"retry: 1000\r\n\r\n"


class _End(StrEnum):
    """Why a stream ended; a label of its metric."""

    #: The client closed the connection.
    LEFT = "left"
    #: The client did not take its events.
    SLOW = "slow"
    #: The database has lost events that the client has.
    LOST = "lost"
    #: The gateway stops.
    STOPPED = "stopped"


class _CountedStream(EventResponse):
    """A stream of server-sent events that the metrics count."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        super().__init__(frames)
        self._end = _End.LEFT

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the client leaves."""
        metrics().streams_open.inc()
        try:
            await super().__call__(scope, receive, send)
        finally:
            metrics().streams_open.dec()
            metrics().stream_ends.labels((_End.SLOW if self.is_cut else self._end).value).inc()


class ChangeAnswer(_CountedStream):
    """Streams hints as server-sent events."""

    def __init__(self, stream: AsyncGenerator[bytes, None]) -> None:
        super().__init__(self._frames(stream))

    async def _frames(self, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        yield _RETRY
        sent = metrics().stream_events.labels("change")
        async with aclosing(stream) as changes:
            async for frames in changes:
                sent.inc()
                yield frames
        self._end = _End.STOPPED


class StreamAnswer(_CountedStream):
    """Streams the events of a chat as server-sent events."""

    def __init__(self, chat_key: str, stream: AsyncGenerator[StreamEvent, None], begin: Position) -> None:
        """Create the answer.

        Args:
            begin: where the stream begins.
        """
        super().__init__(self._frames(chat_key, stream, begin))

    async def _frames(
        self, chat_key: str, stream: AsyncGenerator[StreamEvent, None], begin: Position
    ) -> AsyncIterator[bytes]:
        # So that the reader misses nothing when it loses the connection before an event.
        yield f"id: {begin}\r\n".encode() + _RETRY
        kept, live = (metrics().stream_events.labels(kind) for kind in ("kept", "live"))
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    (live if event.number is None else kept).inc()
                    yield event.frame
            self._end = _End.STOPPED
        except SlowReaderError as exc:
            self._end = _End.SLOW
            logger.bind(reason=str(exc)).info("event_stream_ended")
        except EventsLostError:
            self._end = _End.LOST
            yield lost_frame(chat_key)


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
    does not take its events. The event `events.lost` says that the database has lost events of the chat;
    the stream ends with it, and begins with the oldest kept event, after `data.after` (0), when the client
    connects again. A browser takes the URL from `POST /stream-tickets`.
    """
    identity.require(Scope.READ, chat_key=chat_key)
    wanted = _types(types)
    # A browser that connects again sends the header, and the URL's number is older.
    position = _position(last_event_id)
    if position is None and after is not None:
        position = Position(after)
    take_stream(request, identity)
    # An outage of the database is an error, not an empty stream.
    newest = await hub.newest(chat_key, after=None if position is None else position.number)
    try:
        begin = newest if position is None else await hub.checked(chat_key, position, newest)
    except EventsLostError:
        return EventSourceResponse(iter([lost_frame(chat_key)]))
    stream = hub.stream(chat_key, after=begin.number, types=wanted, with_live=live, owner=identity)
    return StreamAnswer(chat_key, stream, begin)


def _types(text: str) -> frozenset[str]:
    wanted = frozenset(filter(None, (item.strip() for item in text.split(","))))
    unknown = wanted.difference(EventType)
    if unknown:
        raise RefusedError(
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
        raise RefusedError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "invalid_request",
            f"Last-Event-ID: {text!r} is not the id of an event; send the `id` of the last event",
        )
    return Position(int(match[1]), match[2])


@router.get("/changes", response_class=EventSourceResponse)
async def read_changes(
    request: Request,
    hub: HubDep,
    identity: IdentityDep,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    ticket: Annotated[str | None, Query(description="A stream ticket, in the place of a key.")] = None,
) -> EventSourceResponse:
    """Stream hints about what has changed, in all chats and things that the key may list.

    The event `change` has `{"kind", "chat_key"}` and nothing of the content: read the list again. Several
    changes of the same kind and chat within 0.3 s are one hint. The event `reset` says that changes may have
    been missed: read everything again. A stream begins with `reset`, unless it resumes with `Last-Event-ID`
    at a gateway that knows what came since. It ends when the key is revoked or expires.
    """
    if not kinds_of(identity):
        raise RefusedError(HTTPStatus.FORBIDDEN, "scope_missing", "the key lacks the scope 'read'")
    take_stream(request, identity)
    changes: Changes = request.app.state.changes
    return ChangeAnswer(changes.stream(identity, last_id=last_event_id))


@router.post("/stream-tickets", status_code=HTTPStatus.CREATED, openapi_extra={**NOT_ONCE})
async def create_stream_ticket(
    body: StreamTicketBody, services: ServicesDep, identity: IdentityDep
) -> StreamTicket:
    """Return a ticket that lets a browser read an event stream for 10 minutes.

    The stream is that of a chat's events, or that of changes. `EventSource` cannot send a key. `path` has the
    ticket as a parameter, and is valid for this stream only, as long as the key is: also when the browser
    connects again. A stream that is open stays open when the 10 minutes are over. Each ticket is new, and
    none is stored, so there is no idempotency key for this. A ticket gives what the scope `read` permits,
    also for the stream of changes.
    """
    identity.require(Scope.READ, chat_key=body.chat_key)
    chat_key = body.chat_key or ""
    stream = f"chats/{quote(chat_key, safe='')}/events" if chat_key else "changes"
    ticket, expires_at = make_ticket(services.settings, key_id=identity.credential_id, chat_key=chat_key)
    return StreamTicket(ticket=ticket, path=f"/api/v1/{stream}?ticket={ticket}", expires_at=expires_at)
