"""Which plugins of a chat are awake although they may sleep, and for how many turns.

A chat's activations are one value among those of the plugins, under the key of the built-in methods, which
no plugin has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Executable, Integer, bindparam, delete, func, literal_column, select

from nekro_agent.methods import BUILT_IN_PLUGIN
from storage.access.value_digest import value_digest
from storage.clock import now
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository
from storage.states import RoundState
from storage.tables import PLUGIN_VALUES, ROUNDS
from storage.upsert import insert

__all__ = ["Activation", "ActivationRepository"]

_STORE_KEY: Final = "activations"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A plugin was woken in a chat."""

    #: It is awake in turns whose first round has a larger sequence.
    after: int
    #: How many of these turns; None: all.
    turns: int | None


class ActivationRepository(Repository):
    """The activations of chats."""

    async def of_chat(self, chat_key: str) -> dict[str, Activation]:
        """Return the chat's activations by plugin key, also those that are over."""
        text = await self._scalar(_get_statement, {"of_digest": _digest(chat_key)})
        if text is None:
            return {}
        # Each field by name: another release may have stored more.
        return {
            key: Activation(after=one["after"], turns=one["turns"]) for key, one in json.loads(text).items()
        }

    async def replace(self, chat_key: str, activations: Mapping[str, Activation]) -> None:
        """Store the chat's activations; the caller holds the chat's lock since it read the old ones."""
        digest = _digest(chat_key)
        if not activations:
            await self._count(delete(PLUGIN_VALUES).where(PLUGIN_VALUES.c.digest == digest))
            return
        new = insert(self._dialect, PLUGIN_VALUES).values(
            digest=digest,
            plugin_key=BUILT_IN_PLUGIN,
            chat_key=chat_key,
            user_key="",
            store_key=_STORE_KEY,
            value=json.dumps({key: vars(found) for key, found in sorted(activations.items())}),
            revision=1,
            created_at=now(),
            updated_at=now(),
        )
        changed = {
            "value": new.excluded.value,
            "revision": PLUGIN_VALUES.c.revision + literal_column("1"),
            "updated_at": new.excluded.updated_at,
        }
        await self._count(new.on_conflict_do_update(index_elements=[PLUGIN_VALUES.c.digest], set_=changed))

    async def newest_round(self, chat_key: str) -> int:
        """Return the sequence of the chat's newest round; 0 without one."""
        statement = select(func.coalesce(func.max(ROUNDS.c.sequence), 0))
        return int(await self._scalar(statement.where(ROUNDS.c.chat_key == chat_key)))

    async def first_round(self, turn_id: str) -> int | None:
        """Return the sequence of the first round of a turn; None if it has none."""
        statement = select(func.min(ROUNDS.c.sequence)).where(ROUNDS.c.turn_id == turn_id)
        found: int | None = await self._scalar(statement)
        return found

    async def turns_begun(self, chat_key: str, *, after: int, before: int, limit: int) -> list[int]:
        """Return the sequences of the first rounds of the newest turns of a chat between two sequences.

        A turn that another one answered (a merged round) does not count. Neither does one whose rounds have
        been deleted: a chat without a turn for that long has its plugins awake for some turns more.
        """
        values = {"of_chat": chat_key, "after": after, "before": before, "most": limit}
        return list((await self._rows(_turns_statement, values)).scalars())

    async def recent_calls(self, chat_key: str, *, before: int, limit: int) -> list[list[dict[str, object]]]:
        """Return the calls of the chat's newest rounds as ``call_json`` describes them, newest round first.

        Args:
            before: only rounds with a smaller sequence.
        """
        values = {"of_chat": chat_key, "before": before, "most": limit}
        return list((await self._rows(_calls_statement, values)).scalars())


def _digest(chat_key: str) -> bytes:
    return value_digest(BUILT_IN_PLUGIN, chat_key, "", _STORE_KEY)


@FixedStatement
def _get_statement(_dialect: str) -> Executable:
    return select(PLUGIN_VALUES.c.value).where(PLUGIN_VALUES.c.digest == bindparam("of_digest"))


@FixedStatement
def _turns_statement(_dialect: str) -> Executable:
    return (
        select(ROUNDS.c.sequence)
        .where(
            ROUNDS.c.chat_key == bindparam("of_chat"),
            ROUNDS.c.sequence > bindparam("after"),
            ROUNDS.c.sequence < bindparam("before"),
            ROUNDS.c.number == literal_column("1"),
            ROUNDS.c.state != RoundState.MERGED,
        )
        .order_by(ROUNDS.c.sequence.desc())
        .limit(bindparam("most", type_=Integer()))
    )


@FixedStatement
def _calls_statement(_dialect: str) -> Executable:
    return (
        select(ROUNDS.c.calls)
        .where(
            ROUNDS.c.chat_key == bindparam("of_chat"),
            ROUNDS.c.sequence < bindparam("before"),
            ROUNDS.c.calls.is_not(None),
        )
        .order_by(ROUNDS.c.sequence.desc())
        .limit(bindparam("most", type_=Integer()))
    )
