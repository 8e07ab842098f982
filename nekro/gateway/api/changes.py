"""The stream of changes in all chats and in the fleet, as server-sent events."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from sse_starlette import EventSourceResponse

from nekro.gateway.dependencies import HubDep, IdentityDep, take_stream
from nekro.gateway.problems import ProblemError
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.streams.answer import ChangeAnswer
from nekro.gateway.streams.change_readers import kinds_of
from nekro.gateway.streams.changes import Changes

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["events"])


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
        raise ProblemError(HTTPStatus.FORBIDDEN, "scope_missing", "the key lacks the scope 'read'")
    hub.require_room()
    take_stream(request, identity)
    changes: Changes = request.app.state.changes
    return ChangeAnswer(changes.stream(identity, last_id=last_event_id))
