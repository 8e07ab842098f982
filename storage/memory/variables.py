"""Variables of programs, kept between the runs of one turn as tagged text, which only a sandbox reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select

from storage.clock import now
from storage.repositories.base import Repository
from storage.tables import TURN_VARIABLES
from storage.upsert import insert

__all__ = ["TurnVariables", "VariableRepository"]


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
