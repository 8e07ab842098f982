"""Turns: lists of them, the whole tree of one, its cancellation and replay; the rounds of a chat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from nekro.app.services import Services
from nekro.gateway.dependencies import ChatKey, IdentityDep, PathText, ServicesDep
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.replays import replay_turn as replay_in_new_chat
from nekro.gateway.streams.turn_lists import read_turns
from nekro.gateway.streams.turn_tree import read_call, read_rounds, read_turn
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit
from nekro.operations.actor import Identity, Scope
from nekro.operations.pages import Moment, cursor_invalid, cursor_of, number_of, place_of, place_text
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NotFoundError
from nekro_client.models import Call, Page, ReplayedTurn, ReplayTurnBody, Round, Turn, TurnState, TurnSummary
from storage.listings.chats import TurnFilter, TurnPosition
from storage.repositories.rounds import Round as RoundRow

__all__ = [
    "router",
]


router = APIRouter(route_class=KeyedRoute, tags=["turns"])

_NAME: Final[dict[str, Any]] = {"min_length": 1, "max_length": 200}


@dataclass(frozen=True)
class _Query:
    state: Annotated[TurnState | None, Query(description="only in this state")] = None
    since: Annotated[Moment | None, Query(description="only requested then or later")] = None
    until: Annotated[Moment | None, Query(description="only requested before")] = None
    model: Annotated[str | None, Query(**_NAME, description="only with an answer of this model")] = None
    plugin: Annotated[
        str | None, Query(**_NAME, description="only with a call of this plugin, by its key")
    ] = None
    min_cost: Annotated[
        float | None,
        Query(ge=0, allow_inf_nan=False, description="only ended, and their rounds cost at least that"),
    ] = None
    limit: Limit = 50
    cursor: Cursor = None

    @property
    def wanted(self) -> TurnFilter:
        return TurnFilter(
            since=self.since,
            until=self.until,
            model=self.model,
            plugin=self.plugin,
            min_cost=self.min_cost,
        )

    @property
    def after(self) -> TurnPosition | None:
        if self.cursor is None:
            return None
        requested_at, number = place_of(self.cursor)
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise cursor_invalid()
        return TurnPosition(requested_at=requested_at, sequence=int(number))


_QueryDep = Annotated[_Query, Depends()]


@router.get("/turns")
async def list_all_turns(services: ServicesDep, identity: IdentityDep, query: _QueryDep) -> Page[TurnSummary]:
    """List the turns of all chats that the key has, the newest first.

    A plugin or a model is found when the round that used it has ended. A page may have fewer turns than
    `limit`, also none, although `next_cursor` names a next one.
    """
    identity.require(Scope.READ)
    has_chat = None if identity.is_of_all_chats else identity.has_chat
    async with services.database.read() as transaction:
        found, at = await read_turns(
            transaction,
            replace(query.wanted, prefix=identity.chat_prefix),
            limit=query.limit,
            after=query.after,
            state=query.state,
            has_chat=has_chat,
        )
    return _page(found, at)


@router.get("/chats/{chat_key}/turns")
async def list_turns(
    chat_key: ChatKey, services: ServicesDep, identity: IdentityDep, query: _QueryDep
) -> Page[TurnSummary]:
    """List the turns of a chat, the newest first; `GET /turns/{id}` has the whole of one.

    With `state` a page may have fewer turns than `limit`, also none, although `next_cursor` names a next one.
    """
    identity.require(Scope.READ, chat_key=chat_key)
    async with services.database.read() as transaction:
        if await transaction.chats.find(chat_key) is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
        found, at = await read_turns(
            transaction,
            replace(query.wanted, chat_key=chat_key),
            limit=query.limit,
            after=query.after,
            state=query.state,
        )
    return _page(found, at)


def _page(found: list[TurnSummary], at: TurnPosition | None) -> Page[TurnSummary]:
    more = None if at is None else cursor_of(place_text(at.requested_at, str(at.sequence)))
    return Page(items=found, next_cursor=more)


#: The Python client up to release 0.2. Its `turns.wait` would not return while a person has to decide.
_FORMER_CLIENT: Final = "nekro-client"
#: Fields of a turn that only a key which may read the chat sees.
_NO_CONTENT: Final[dict[str, Any]] = {
    "error": None,
    "rounds": [],
    "messages": [],
    "jobs": [],
    "following": [],
}


@router.get("/turns/{turn_id}")
async def get_turn(
    turn_id: PathText,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    values: Annotated[
        bool, Query(description="Whether calls have their arguments and results; they may be large.")
    ] = True,
    prompts: Annotated[
        bool,
        Query(description="Whether rounds have what was sent to the model, if it is kept; needs `admin`."),
    ] = False,
) -> Turn:
    """Return a turn: rounds with requests, code, output and calls; messages; jobs."""
    await _first_round(services, identity, turn_id, Scope.READ)
    if prompts:
        identity.require(Scope.ADMIN)
    turn = await read_turn(services, turn_id, with_values=values, with_prompts=prompts)
    if turn.waits_for and request.headers.get("user-agent") == _FORMER_CLIENT:
        return turn.model_copy(update={"state": TurnState.DONE})
    return turn


@router.get("/turns/{turn_id}/calls/{call_id}")
async def get_call(
    turn_id: PathText, call_id: PathText, services: ServicesDep, identity: IdentityDep
) -> Call:
    """Return a call of a turn, with its arguments and its result."""
    await _first_round(services, identity, turn_id, Scope.READ)
    return await read_call(services, turn_id, call_id)


@router.get("/chats/{chat_key}/rounds")
async def list_rounds(
    chat_key: ChatKey,
    services: ServicesDep,
    identity: IdentityDep,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Round]:
    """List the rounds of a chat, the newest first; their calls have no arguments and values."""
    identity.require(Scope.READ, chat_key=chat_key)
    before = None if cursor is None else number_of(cursor)
    async with services.database.read() as transaction:
        if await transaction.chats.find(chat_key) is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
    found = await read_rounds(services.database, chat_key, limit=limit, before=before)
    more = cursor_of(found[-1][0]) if len(found) == limit else None
    return Page(items=[item for _, item in found], next_cursor=more)


@router.post("/turns/{turn_id}/cancel", response_model=Turn)
async def cancel_turn(
    turn_id: PathText, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Cancel the waiting and running rounds of a turn, and only of that one; returns it as it is then.

    Calls of the turn that wait for approval are withdrawn, and a turn that waited for them is then cancelled,
    although its rounds have ended. A running round whose worker
    does not answer within seconds ends later. A turn that has ended, or that a round of another turn answers,
    stays as it is. A key without the scope `read` gets its state and times only.
    """
    first = await _first_round(services, identity, turn_id, Scope.POST)

    async def work() -> Turn:
        await services.stopper.stop(
            first.chat_key,
            reason="cancelled on request",
            wait_seconds=CLOSE_STEP_SECONDS,
            turn_id=turn_id,
        )
        turn = await read_turn(services, turn_id)
        return turn if Scope.READ in identity.scopes else turn.model_copy(update=_NO_CONTENT)

    return await once.respond(work)


@router.post("/turns/{turn_id}/replay", status_code=HTTPStatus.CREATED, response_model=ReplayedTurn)
async def replay_turn(
    turn_id: PathText, body: ReplayTurnBody, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Run a turn again in a new chat, which gets the history up to the message that caused the turn.

    The old chat stays as it is. Messages, their files, persona and model group are copied; what plugins keep
    for the chat, and `/app/shared`, are not. Methods run as always, also those with effects elsewhere.
    """
    first = await _first_round(services, identity, turn_id, Scope.READ)
    chat_key = body.chat_key or f"{first.chat_key}-replay-{once.id[:8]}"
    identity.require(Scope.POST, chat_key=chat_key)

    async def work() -> ReplayedTurn:
        return await replay_in_new_chat(
            services,
            identity,
            first,
            chat_key=chat_key,
            once=once.name,
            is_again=once.is_repetition,
        )

    return await once.respond(work, status=HTTPStatus.CREATED)


async def _first_round(services: Services, identity: Identity, turn_id: str, scope: Scope) -> RoundRow:
    """Return the turn's first round, whose id is the turn's.

    Raises:
        NotFoundError: there is no such turn.
        RefusedError: the key may not; a turn of a chat that it does not have is reported as missing.
    """
    identity.require(scope)
    async with services.database.read() as transaction:
        first = await transaction.rounds.find(turn_id)
    if first is None or first.turn_id != turn_id or not identity.has_chat(first.chat_key):
        raise NotFoundError(f"there is no turn {turn_id!r}")
    return first
