"""``/v1/responses``: created, streamed, read again, cancelled, deleted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from loguru import logger
from pydantic import RootModel

from nekro.app.services import Services
from nekro.extensions.openai import completions
from nekro.extensions.openai.answers import QUEUED_SECONDS, AnswerReader
from nekro.extensions.openai.bodies import ResponseBody, newest_text_or_items
from nekro.extensions.openai.chats import (
    ERROR_FORM,
    NO_RETRY,
    APIError,
    OpenAIRoute,
    chosen_chat,
    has_many_chats,
    once_for,
    post,
    require_model,
    stated_conversation,
    stated_person,
    transient_chat,
)
from nekro.extensions.openai.examples import EXAMPLES
from nekro.extensions.openai.response_events import ResponseView
from nekro.extensions.openai.rows import ResponseRows, StoredResponse
from nekro.gateway.dependencies import HubDep, IdentityDep, ServicesDep, take_stream
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.streams.hub import SlowReaderError
from nekro.gateway.web.responses import EventResponse, JsonAnswer
from nekro.operations.actor import Identity, Scope
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NekroError
from nekro_agent.shared_clock import shared_time
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.repositories.messages import Message
from storage.states import StoredKind
from storage.transaction import Transaction

__all__ = ["GATEWAY_PART"]

router = APIRouter(route_class=OpenAIRoute, tags=["openai"])


async def _reader(request: Request, services: ServicesDep, hub: HubDep) -> AnswerReader:
    return AnswerReader(request, services, hub)


_Shown = RootModel[dict[str, Any]]
ReaderDep = Annotated[AnswerReader, Depends(_reader)]


@router.post("/v1/responses", response_class=Response)
async def create_response(
    body: ResponseBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    reader: ReaderDep,
    x_nekro_chat: Annotated[str | None, Header()] = None,
) -> Response:
    """Post the newest message of the user; the response is what the agent sends to the chat in that turn."""
    require_model(body.model)
    body.refuse_demands()
    if body.background and body.store is False:
        raise _bad("store", "a background response is read later, so it must be stored")
    if body.previous_response_id and body.conversation_id:
        raise _bad("conversation", "state a conversation or a previous response, not both")
    parts = newest_text_or_items(body.input)
    if body.stream:
        take_stream(request, identity)
    once = await once_for(request, x_nekro_chat or "")
    # A repetition with the same Idempotency-Key is the same response.
    response_id = f"resp_{once.id}"
    person, conversation = stated_person(request, body.person), stated_conversation(request)
    stated = (person, body.conversation_id or conversation)
    chat_key = await _chat_of(services, identity, body, x_nekro_chat, stated, response_id)
    new = StoredResponse(
        id=response_id,
        key_id=identity.key_id,
        chat_key=chat_key,
        turn_id=None,
        previous_id=body.previous_response_id,
        model=body.model,
        is_background=bool(body.background),
        stated=_stated(body),
        created_at=shared_time(),
    )

    async def keep(transaction: Transaction, message: Message) -> None:
        row = replace(new, turn_id=message.turn_id, created_at=message.created_at)
        await _keep(transaction, identity, row)

    is_kept = body.store is not False
    posted = await post(
        services, identity, chat_key, parts, person, once=once, also=keep if is_kept else None
    )
    row = replace(new, turn_id=posted.turn_id, created_at=posted.created_at)
    if is_kept and not posted.is_recorded:
        async with services.database.begin() as transaction:
            await _keep(transaction, identity, row)
    if body.stream:
        return _stream(row, reader, after=-1)
    if body.background:
        view = ResponseView(row, status="queued" if row.turn_id else "completed")
        return JsonAnswer(view.as_json())
    return await _whole(row, reader, seconds=services.settings.agent.turn_seconds + QUEUED_SECONDS)


@router.get("/v1/responses/{response_id}", response_class=Response)
async def get_response(
    response_id: str,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    reader: ReaderDep,
    *,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """Return a response as it is now; with ``stream`` its events after a number, then those to come."""
    row = await _found(services, identity, response_id, Scope.READ)
    if stream:
        take_stream(request, identity)
        return _stream(row, reader, after=-1 if starting_after is None else starting_after)
    return JsonAnswer((await _now(row, reader)).as_json())


@router.post("/v1/responses/{response_id}/cancel", response_class=Response)
async def cancel_response(
    response_id: str, services: ServicesDep, identity: IdentityDep, reader: ReaderDep, once: OnceDep
) -> Response:
    """Cancel the turn of a background response; one that has ended stays as it is."""
    row = await _found(services, identity, response_id, Scope.POST)
    if not row.is_background:
        raise _bad("background", "only background responses can be cancelled")

    async def work() -> _Shown:
        if row.turn_id is not None:
            await services.stopper.stop(
                row.chat_key,
                reason="cancelled on request",
                wait_seconds=CLOSE_STEP_SECONDS,
                turn_id=row.turn_id,
            )
        return _Shown((await _now(row, reader)).as_json())

    return await once.respond(work)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, services: ServicesDep, identity: IdentityDep) -> dict[str, Any]:
    """Delete a response; the chat keeps its messages."""
    await _found(services, identity, response_id, Scope.POST)
    async with services.database.begin() as transaction:
        await ResponseRows(transaction.connection).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


async def _keep(transaction: Transaction, identity: Identity, row: StoredResponse) -> None:
    if await ResponseRows(transaction.connection).add(row):
        size = ROW_BYTES + size_of(json.dumps(row.stated))
        transaction.stored_bytes.add(identity.account_id, StoredKind.ROUNDS, size, refuses=False)


async def _chat_of(
    services: Services,
    identity: Identity,
    body: ResponseBody,
    header: str | None,
    stated: tuple[str | None, str | None],
    response_id: str,
) -> str:
    """Return the chat of a new response: that of the previous one, or as ``chosen_chat`` chooses.

    Without any statement the response begins a conversation of its own, which lists leave out.

    Args:
        stated: person and conversation, as the request states them.
    """
    if body.previous_response_id is not None:
        previous = await _found(services, identity, body.previous_response_id, Scope.POST)
        return previous.chat_key
    is_new = header is None and not any(stated) and has_many_chats(identity)
    return transient_chat(identity, response_id) if is_new else chosen_chat(identity, header, *stated)


async def _whole(row: StoredResponse, reader: AnswerReader, *, seconds: float) -> Response:
    view = ResponseView(row)
    try:
        async with asyncio.timeout(seconds):
            await view.finish(reader)
    except (TimeoutError, SlowReaderError) as exc:
        detail = f"the response {row.id} has not ended; retrieve it later"
        raise APIError(HTTPStatus.GATEWAY_TIMEOUT, "turn_timeout", detail, headers=NO_RETRY) from exc
    if view.end is None:
        detail = (
            f"the gateway stopped, or the key is no longer valid; the response {row.id} goes on, retrieve it"
        )
        raise APIError(HTTPStatus.BAD_GATEWAY, "stopping", detail, headers=NO_RETRY)
    return JsonAnswer(view.as_json())


async def _now(row: StoredResponse, reader: AnswerReader) -> ResponseView:
    """Return a response as far as it is known at present."""
    view = ResponseView(row)
    if row.turn_id is None or await reader.has_ended(row.turn_id):
        await view.finish(reader)
    else:
        view.status = await reader.state(row.turn_id)
        view.add_pieces(await reader.so_far(row.turn_id))
    return view


def _stream(row: StoredResponse, reader: AnswerReader, *, after: int) -> EventResponse:
    return EventResponse(_frames(ResponseView(row), reader, after), sep="\n")


async def _frames(view: ResponseView, reader: AnswerReader, after: int) -> AsyncIterator[dict[str, str]]:
    try:
        async for event in view.events(reader, after=after):
            yield {"event": event["type"], "data": json.dumps(event)}
    except (SlowReaderError, NekroError) as exc:
        # The stream ends early; the client continues after the last number that it has.
        logger.bind(response_id=view.row.id, reason=str(exc)).info("response_stream_ended")


async def _found(services: Services, identity: Identity, response_id: str, scope: Scope) -> StoredResponse:
    """Return a response of the key.

    Raises:
        APIError: 404, there is none, or it belongs to another key.
        RefusedError: the key may not.
    """
    identity.require(scope)
    async with services.database.read() as transaction:
        row = await ResponseRows(transaction.connection).find(response_id)
    if row is None or row.key_id != identity.key_id:
        detail = f"there is no response {response_id[:100]!r}"
        raise APIError(HTTPStatus.NOT_FOUND, "not_found", detail, param="response_id")
    identity.require(scope, chat_key=row.chat_key)
    return row


def _stated(body: ResponseBody) -> dict[str, Any]:
    stated = {
        "metadata": body.metadata,
        "conversation": body.conversation_id,
        "user": body.person,
        "store": body.store,
    }
    return {name: value for name, value in stated.items() if value is not None}


def _bad(param: str, message: str) -> APIError:
    return APIError(HTTPStatus.BAD_REQUEST, "invalid_value", f"{param}: {message}", param=param)


GATEWAY_PART: Final = GatewayPart(
    root=(completions.router, router),
    # Pictures and files are in the JSON.
    limits=((re.compile(r"/v1/(chat/completions|responses)"), lambda settings: settings.media_bytes),),
    errors={"/v1/": ERROR_FORM},
    examples=EXAMPLES,
)
