"""Tickets for event streams of browsers."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from fastapi import APIRouter, Response

from gateway.access.tickets import make_ticket
from gateway.dependencies import IdentityDep, ServicesDep
from gateway.identity import Scope
from nekro_client.models import StreamTicket, StreamTicketBody

__all__ = ["router"]

router = APIRouter(tags=["events"])


@router.post("/stream-tickets", status_code=HTTPStatus.CREATED)
async def create_ticket(
    body: StreamTicketBody, response: Response, services: ServicesDep, identity: IdentityDep
) -> StreamTicket:
    """Return a ticket with which a browser reads the event stream of a chat, for 10 minutes.

    `EventSource` cannot send a key. `path` has the ticket as a parameter, and is valid for the stream of this
    chat only, as long as the key is: also when the browser connects again. A stream that is open stays open
    after that. Each ticket is new, and none is stored, so there is no idempotency key for this.
    """
    identity.require(Scope.READ, chat_key=body.chat_key)
    path = quote(body.chat_key, safe="")
    ticket, expires_at = make_ticket(services.settings, key_id=identity.key_id, chat_key=body.chat_key)
    response.headers["Cache-Control"] = "no-store"
    return StreamTicket(
        ticket=ticket, path=f"/api/v1/chats/{path}/events?ticket={ticket}", expires_at=expires_at
    )
