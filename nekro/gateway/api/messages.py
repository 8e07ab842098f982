"""Messages of chats, their reset and cancellation."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from nekro.app.services import Services
from nekro.gateway.dependencies import ChatKey, HubDep, IdentityDep, ServicesDep
from nekro.gateway.forms import MESSAGE_BODY, open_message, store_files
from nekro.gateway.idempotency import REPLAYED, once_of
from nekro.gateway.operation_routes import route
from nekro.gateway.streams.hub import EventHub, SlowReaderError
from nekro.gateway.streams.turns import turn_end
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.responses import JsonAnswer
from nekro.operations import chats
from nekro.operations.actor import Scope
from nekro.operations.admission import KeyFiles
from nekro.operations.pages import MOST_WAIT_SECONDS
from nekro.operations.posting import incoming_message, posted_message, sender_of
from nekro.operations.posting import post_message as post_to_chat
from nekro.operations.turns import read_turn
from nekro_agent.ports import IncomingMessage
from nekro_client.models import PostedMessage, Turn

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["messages"])


@router.post(
    "/chats/{chat_key}/messages",
    status_code=HTTPStatus.ACCEPTED,
    response_model=PostedMessage,
    responses={HTTPStatus.OK: {"model": PostedMessage, "description": "The turn has ended, and is in it."}},
    openapi_extra={"requestBody": MESSAGE_BODY},
)
async def post_message(
    chat_key: ChatKey,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    hub: HubDep,
    wait: Annotated[
        float, Query(ge=0, le=MOST_WAIT_SECONDS, description="Seconds to wait for the end of the turn.")
    ] = 0,
) -> Response:
    """Post a person's message, which starts a turn; a new chat begins with it.

    The body is JSON, or `multipart/form-data` with the files of the message and its other fields. With
    `wait` the answer has the whole turn, and status 200, if the turn ends in time; that needs the scope
    `read` too.
    """
    identity.require(Scope.POST, chat_key=chat_key)
    if wait:
        identity.require(Scope.READ)
    async with open_message(request, services) as posted:
        sender_of(identity, posted.body.user_id)  # before a repetition is looked up
        once = await once_of(request, body=posted.digest)

        async def message() -> IncomingMessage:
            files = await store_files(KeyFiles(services, identity, chat_key), posted.files)
            return await incoming_message(
                services, identity, chat_key, posted.body, parts=posted.parts, files=files
            )

        receipt = await post_to_chat(
            services, identity, chat_key, message, once=once.name, digest=once.body_digest
        )
    answer = posted_message(services.file_ids, receipt)
    headers = REPLAYED if receipt is not None and receipt.is_repetition else None
    if wait and answer.turn_id is not None:
        turn = await _ended_turn(services, hub, answer.turn_id, seconds=wait)
        if turn is not None:
            whole = answer.model_copy(update={"turn": turn})
            return JsonAnswer(whole.model_dump(mode="json"), headers=headers)
    return JsonAnswer(answer.model_dump(mode="json"), status_code=HTTPStatus.ACCEPTED, headers=headers)


route(router, "GET", "/chats/{chat_key}/messages", chats.list_messages)
route(router, "GET", "/chats/{chat_key}/summaries", chats.list_summaries)
route(router, "POST", "/chats/{chat_key}/reset", chats.reset_chat)
route(router, "POST", "/chats/{chat_key}/cancel", chats.cancel_chat)


async def _ended_turn(services: Services, hub: EventHub, turn_id: str, *, seconds: float) -> Turn | None:
    """Return a turn that ends in time, or None."""
    try:
        ended = await turn_end(hub, services.database, turn_id, seconds=seconds)
    except SlowReaderError:
        return None
    turn = await read_turn(services, turn_id)
    return None if ended is None and turn.finished_at is None else turn
