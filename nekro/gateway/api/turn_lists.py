"""Lists of turns: of a chat, and of all chats that a key has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query

from nekro.gateway.dependencies import ChatKey, IdentityDep, ServicesDep
from nekro.gateway.identity import Scope
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.streams.turn_lists import read_turns
from nekro.gateway.web.paging import Cursor, Limit, Moment, cursor_invalid, cursor_of, place_of, place_text
from nekro_agent.errors import NotFoundError
from nekro_client.models import Page, TurnState, TurnSummary
from storage.listings.turn_search import TurnFilter, TurnPosition

__all__ = ["router"]

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
