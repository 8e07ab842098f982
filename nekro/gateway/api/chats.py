"""Chats; and turns: lists of them, the whole tree of one, its cancellation and replay; rounds."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from nekro.gateway.dependencies import ChatKey, PathText
from nekro.gateway.operation_routes import ActorDep, route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations import chats, posting, turn_lists, turns
from nekro.operations.pages import Moment
from nekro_client.models import Page, Turn, TurnState, TurnSummary

__all__ = ["router", "turn_router"]


router = APIRouter(route_class=KeyedRoute, tags=["chats"])

route(router, "GET", "/chats", chats.list_chats)
route(router, "GET", "/chats/{chat_key}", chats.get_chat)
route(router, "PATCH", "/chats/{chat_key}", chats.change_chat)

turn_router = APIRouter(route_class=KeyedRoute, tags=["turns"])

_NAME: Final[dict[str, Any]] = {"min_length": 1, "max_length": 200}


class _Query(BaseModel):
    state: TurnState | None = Field(None, description="only in this state")
    since: Moment | None = Field(None, description="only requested then or later")
    until: Moment | None = Field(None, description="only requested before")
    model: str | None = Field(None, **_NAME, description="only with an answer of this model")
    plugin: str | None = Field(None, **_NAME, description="only with a call of this plugin, by its key")
    min_cost: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="only ended, and their rounds cost at least that"
    )
    beginning: str = Field(
        "", alias="id", max_length=200, description="only those whose ids begin with this text"
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=2000)


_QueryDep = Annotated[_Query, Query()]


@turn_router.get("/turns")
async def list_all_turns(actor: ActorDep, query: _QueryDep) -> Page[TurnSummary]:
    """List the turns of all chats that the key has, the newest first.

    A plugin or a model is found when the round that used it has ended. A page may have fewer turns than
    `limit`, also none, although `next_cursor` names a next one.
    """
    return await turn_lists.list_turns(actor, **vars(query))


@turn_router.get("/chats/{chat_key}/turns")
async def list_turns(chat_key: ChatKey, actor: ActorDep, query: _QueryDep) -> Page[TurnSummary]:
    """List the turns of a chat, the newest first; `GET /turns/{id}` has the whole of one.

    With `state` a page may have fewer turns than `limit`, also none, although `next_cursor` names a next one.
    """
    return await turn_lists.list_turns(actor, chat_key, **vars(query))


#: The Python client up to release 0.2. Its `turns.wait` would not return while a person has to decide.
_FORMER_CLIENT: Final = "nekro-client"


@turn_router.get("/turns/{turn_id}")
async def get_turn(
    turn_id: PathText,
    request: Request,
    actor: ActorDep,
    values: Annotated[
        bool, Query(description="Whether calls have their arguments and results; they may be large.")
    ] = True,
    prompts: Annotated[
        bool,
        Query(description="Whether rounds have what was sent to the model, if it is kept; needs `admin`."),
    ] = False,
) -> Turn:
    """Return a turn: rounds with requests, code, output and calls; messages; jobs."""
    turn = await turns.get_turn(actor, turn_id, with_values=values, with_prompts=prompts)
    if (turn.waits_for or turn.waits) and request.headers.get("user-agent") == _FORMER_CLIENT:
        return turn.model_copy(update={"state": TurnState.DONE})
    return turn


route(turn_router, "GET", "/turns/{turn_id}/calls/{call_id}", turns.get_call)
route(turn_router, "GET", "/chats/{chat_key}/rounds", turns.list_rounds)
route(turn_router, "POST", "/turns/{turn_id}/cancel", turns.cancel_turn)
route(turn_router, "POST", "/turns/{turn_id}/replay", posting.replay_turn, status=HTTPStatus.CREATED)
