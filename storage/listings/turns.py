"""Turns of a chat, with what a list of them shows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from storage.repositories.base import Repository
from storage.repositories.events import ChatEvent
from storage.states import EventType, RoundState, TriggerKind
from storage.tables import CHAT_EVENTS, MESSAGES, ROUNDS

__all__ = ["COLUMNS", "ListedRound", "TurnListing"]

#: Of a ``ListedRound``.
COLUMNS = (
    ROUNDS.c.sequence, ROUNDS.c.id, ROUNDS.c.chat_key, ROUNDS.c.turn_id, ROUNDS.c.state,
    ROUNDS.c.trigger_kind, ROUNDS.c.trigger_id, ROUNDS.c.attempt, ROUNDS.c.user_id, ROUNDS.c.merged_into,
    ROUNDS.c.requested_at, ROUNDS.c.started_at, ROUNDS.c.finished_at, ROUNDS.c.model,
    ROUNDS.c.prompt_tokens, ROUNDS.c.completion_tokens, ROUNDS.c.tokens_estimated, ROUNDS.c.cost,
    ROUNDS.c.error,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ListedRound:
    """A round without its texts and calls, which may be long."""

    sequence: int
    id: str
    chat_key: str
    turn_id: str
    state: RoundState
    trigger_kind: TriggerKind
    trigger_id: str
    attempt: int
    user_id: str | None
    merged_into: str | None
    requested_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens_estimated: bool | None
    cost: float | None
    error: str | None


class TurnListing(Repository):
    """Reads turns for lists."""

    async def with_prefix(self, beginning: str, *, limit: int) -> list[str]:
        """List ids of turns that begin with a text, in the order of ids."""
        is_found = ROUNDS.c.id.startswith(beginning, autoescape=True) & (ROUNDS.c.id == ROUNDS.c.turn_id)
        statement = select(ROUNDS.c.id).where(is_found).order_by(ROUNDS.c.id).limit(limit)
        return (await self._rows(statement)).scalars()

    async def rounds(self, turn_ids: Collection[str]) -> list[ListedRound]:
        """List the rounds of turns, in order."""
        statement = select(*COLUMNS).where(ROUNDS.c.turn_id.in_(turn_ids)).order_by(ROUNDS.c.sequence)
        return await self._all(ListedRound, statement)

    async def by_id(self, round_ids: Collection[str]) -> dict[str, ListedRound]:
        """Return rounds by their ids; those that do not exist are left out."""
        statement = select(*COLUMNS).where(ROUNDS.c.id.in_(round_ids))
        return {item.id: item for item in await self._all(ListedRound, statement)}

    async def caused(self, kind: TriggerKind, trigger_ids: Collection[str]) -> list[ListedRound]:
        """List the rounds that were caused by some triggers of one kind, in order."""
        if not trigger_ids:
            return []
        is_caused = (ROUNDS.c.trigger_kind == kind) & ROUNDS.c.trigger_id.in_(trigger_ids)
        return await self._all(ListedRound, select(*COLUMNS).where(is_caused).order_by(ROUNDS.c.sequence))

    async def ends(self, turn_ids: Collection[str]) -> dict[str, ChatEvent]:
        """Return the events with which turns ended, by the turns' ids; open ones are left out."""
        statement = select(CHAT_EVENTS).where(
            CHAT_EVENTS.c.turn_id.in_(turn_ids), CHAT_EVENTS.c.type == EventType.TURN_ENDED.value
        )
        return {event.turn_id or "": event for event in await self._all(ChatEvent, statement)}

    async def texts(self, message_ids: Collection[str]) -> dict[str, str]:
        """Return the texts of messages by their ids."""
        statement = select(MESSAGES.c.id, MESSAGES.c.text).where(MESSAGES.c.id.in_(message_ids))
        return {row[0]: row[1] for row in await self._rows(statement)}
