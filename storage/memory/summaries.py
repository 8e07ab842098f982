"""Summaries of the older messages of chats: one row per version, built one upon the other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import delete, select

from storage.clock import now
from storage.repositories.base import Repository
from storage.repositories.chats import ChatRepository
from storage.tables import CHAT_SUMMARIES
from storage.upsert import insert

__all__ = ["KEPT_VERSIONS", "NewSummary", "Summary", "SummaryRepository"]

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
        values = {field.name: getattr(summary, field.name) for field in dataclasses.fields(NewSummary)}
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
