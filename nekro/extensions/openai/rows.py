"""Responses of the OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select

from storage.repositories.base import Repository
from storage.sql import insert
from storage.tables import OPENAI_RESPONSES

__all__ = ["ResponseRows", "StoredResponse"]


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """One response; its fields as in ``OPENAI_RESPONSES``."""

    id: str
    key_id: str | None
    chat_key: str
    turn_id: str | None
    previous_id: str | None
    model: str
    is_background: bool
    stated: dict[str, Any]
    created_at: datetime


class ResponseRows(Repository):
    """Rows of responses."""

    async def add(self, response: StoredResponse) -> bool:
        """Keep a response; False if one of its id is kept already."""
        new = insert(self._dialect, OPENAI_RESPONSES).values(**vars(response))
        added = new.on_conflict_do_nothing().returning(OPENAI_RESPONSES.c.id)
        return await self._scalar(added) is not None

    async def find(self, response_id: str) -> StoredResponse | None:
        """Return the response, or None."""
        statement = select(OPENAI_RESPONSES).where(OPENAI_RESPONSES.c.id == response_id)
        return await self._one_or_none(StoredResponse, statement)

    async def delete(self, response_id: str) -> bool:
        """Delete a response; False when there is none."""
        return await self._count(delete(OPENAI_RESPONSES).where(OPENAI_RESPONSES.c.id == response_id)) > 0
