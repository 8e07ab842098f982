"""What was sent to the model in each round, where the operator keeps that."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import select

from storage.clock import now
from storage.repositories.base import Repository
from storage.tables import ROUND_PROMPTS
from storage.upsert import insert

__all__ = ["PromptRepository"]


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
