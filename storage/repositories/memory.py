"""What the agent keeps of its chats: summaries, variables of open turns, and prompts of rounds.

There is one row per version of a summary, built one upon the other. Variables of programs are kept between
the runs of one turn as tagged text, which only a sandbox reads. Prompts are kept where the operator wants
that."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, select

from storage.repositories.base import Repository, values_of
from storage.repositories.chats import ChatRepository
from storage.sql import insert, now
from storage.tables import CHAT_SUMMARIES, ROUND_PROMPTS, TURN_VARIABLES

__all__ = [
    "KEPT_VERSIONS",
    "NewSummary",
    "PromptRepository",
    "Summary",
    "SummaryRepository",
    "TurnVariables",
    "VariableRepository",
]


#: Versions of a chat that are kept; an open turn shows the one that was the newest when it began.
KEPT_VERSIONS: Final = 10


@dataclass(frozen=True, kw_only=True)
class NewSummary:
    """A summary of the messages of a chat up to one of them."""

    chat_key: str
    #: Grows by 1 within a chat; the first one after a reset is 1.
    version: int
    #: Sequence of the newest message that it covers.
    up_to: int
    #: When the oldest and the newest of them were written.
    oldest_at: datetime
    newest_at: datetime
    text: str
    #: The model group that was asked and the model that answered, as the endpoint names it.
    group_name: str
    model: str
    #: Of this version alone.
    prompt_tokens: int | None
    answer_tokens: int | None
    #: Whether they are an estimate, because the endpoint reported no possible number.
    tokens_estimated: bool
    cost: float


@dataclass(frozen=True, kw_only=True)
class Summary(NewSummary):
    """A recorded summary."""

    created_at: datetime


class SummaryRepository(Repository):
    """Rows of summaries.

    Every row that exists is valid: a reset, and the change or deletion of a message, delete those that cover
    it in the same transaction.
    """

    async def newest(self, chat_key: str, *, before: datetime | None = None) -> Summary | None:
        """Return the chat's newest summary, or None.

        Args:
            before: only one that was recorded before this time; None does not limit.
        """
        statement = select(CHAT_SUMMARIES).where(CHAT_SUMMARIES.c.chat_key == chat_key)
        if before is not None:
            statement = statement.where(CHAT_SUMMARIES.c.created_at < before)
        return await self._one_or_none(Summary, statement.order_by(CHAT_SUMMARIES.c.version.desc()).limit(1))

    async def versions(self, chat_key: str) -> list[Summary]:
        """List the chat's summaries, the newest first."""
        statement = select(CHAT_SUMMARIES).where(CHAT_SUMMARIES.c.chat_key == chat_key)
        return await self._all(Summary, statement.order_by(CHAT_SUMMARIES.c.version.desc()))

    async def add(self, summary: NewSummary, *, history_revision: int, reset_at: datetime | None) -> bool:
        """Record the next version; False if the history changed, or another process was faster.

        Args:
            history_revision, reset_at: those of the chat when its messages were read.

        Raises:
            NotFoundError: there is no such chat.
        """
        chats = ChatRepository(self._connection)
        await chats.lock(summary.chat_key)
        chat = await chats.get(summary.chat_key)
        if (chat.history_revision, chat.reset_at) != (history_revision, reset_at):
            return False
        newest = await self.newest(summary.chat_key)
        if summary.version != (1 if newest is None else newest.version + 1):
            return False
        values = values_of(summary, NewSummary)
        new = insert(self._dialect, CHAT_SUMMARIES).values(**values, created_at=now())
        added = await self._one_or_none(Summary, new.on_conflict_do_nothing().returning(CHAT_SUMMARIES))
        if added is None:
            return False
        await self._count(
            delete(CHAT_SUMMARIES).where(
                CHAT_SUMMARIES.c.chat_key == summary.chat_key,
                CHAT_SUMMARIES.c.version <= summary.version - KEPT_VERSIONS,
            )
        )
        return True


@dataclass(frozen=True, kw_only=True)
class TurnVariables:
    """The variables of an open turn."""

    turn_id: str
    chat_key: str
    #: The round whose program left them.
    round_id: str
    #: Tagged text of each variable by its name, as the host has checked it.
    kept: dict[str, str]
    #: Names of variables that were not kept.
    not_kept: list[str]


class VariableRepository(Repository):
    """Rows of variables: one per open turn."""

    async def find(self, turn_id: str) -> TurnVariables | None:
        """Return the variables of a turn, or None."""
        statement = select(TURN_VARIABLES).where(TURN_VARIABLES.c.turn_id == turn_id)
        return await self._one_or_none(TurnVariables, statement)

    async def replace(self, variables: TurnVariables) -> None:
        """Store the variables of a turn; the caller holds the lease of the chat."""
        values: dict[str, Any] = {**vars(variables), "updated_at": now()}
        new = insert(self._dialect, TURN_VARIABLES).values(**values)
        changed = {name: new.excluded[name] for name in values if name != "turn_id"}
        await self._count(new.on_conflict_do_update(index_elements=[TURN_VARIABLES.c.turn_id], set_=changed))

    async def drop(self, *turn_ids: str) -> None:
        """Delete the variables of turns."""
        if turn_ids:
            await self._count(delete(TURN_VARIABLES).where(TURN_VARIABLES.c.turn_id.in_(turn_ids)))


class PromptRepository(Repository):
    """Rows of prompts: the newest one of each round."""

    async def keep(self, round_id: str, prompt: str) -> None:
        """Store what is sent in a round, in place of what an earlier request of it sent.

        Args:
            prompt: messages as JSON.
        """
        values = {"round_id": round_id, "prompt": prompt, "sent_at": now()}
        new = insert(self._dialect, ROUND_PROMPTS).values(values)
        changed = {name: new.excluded[name] for name in ("prompt", "sent_at")}
        await self._count(new.on_conflict_do_update(index_elements=[ROUND_PROMPTS.c.round_id], set_=changed))

    async def kept(self, round_ids: Collection[str]) -> set[str]:
        """Return those of the rounds whose prompts are kept."""
        statement = select(ROUND_PROMPTS.c.round_id).where(ROUND_PROMPTS.c.round_id.in_(round_ids))
        return set((await self._rows(statement)).scalars())

    async def of_rounds(self, round_ids: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the messages of prompts by the ids of their rounds; what is not kept is left out."""
        statement = select(ROUND_PROMPTS.c.round_id, ROUND_PROMPTS.c.prompt).where(
            ROUND_PROMPTS.c.round_id.in_(round_ids)
        )
        return {row[0]: json.loads(row[1]) for row in await self._rows(statement)}
