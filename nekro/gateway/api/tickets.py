"""Tickets for event streams of browsers."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from fastapi import APIRouter

from nekro.gateway.access.tickets import make_ticket
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.identity import Scope
from nekro.gateway.routing import KeyedRoute
from nekro_client.models import StreamTicket, StreamTicketBody

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["events"])


@router.post("/stream-tickets", status_code=HTTPStatus.CREATED)
async def create_stream_ticket(
    body: StreamTicketBody, services: ServicesDep, identity: IdentityDep
) -> StreamTicket:
    """Return a ticket with which a browser reads an event stream, for 10 minutes.

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
