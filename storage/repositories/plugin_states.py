"""What operators, the watchdog and chats decide on plugins: lanes of methods, states, activations.

Activations say which plugins of a chat are awake although they may sleep, and for how many turns. Those of a
chat are one value among those of the plugins, under the key of the built-in methods, which no plugin has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Executable, Integer, bindparam, delete, func, literal_column, select, update

from nekro_agent.methods import BUILT_IN_PLUGIN, Lane
from storage.driver.statements import FixedStatement
from storage.plugin_values import DELETE, GET, SCOPE, SET, value_digest
from storage.repositories.base import Repository
from storage.sql import insert, now
from storage.states import OverrideSource, RoundState
from storage.tables import LANE_OVERRIDES, PLUGIN_STATES, ROUNDS

__all__ = [
    "Activation",
    "ActivationRepository",
    "LaneOverrideRepository",
    "PluginState",
    "PluginStateRepository",
]


class LaneOverrideRepository(Repository):
    """Rows of lane overrides, at most one per method."""

    async def set_by_watchdog(self, method: str, *, lane: Lane, reason: str) -> bool:
        """Record an override by the watchdog; False when an operator's override exists, which is kept."""
        return await self._write(method, lane, reason, OverrideSource.WATCHDOG)

    async def set_by_operator(self, method: str, *, lane: Lane, reason: str) -> None:
        """Record an operator's override, which the watchdog does not change."""
        await self._write(method, lane, reason, OverrideSource.OPERATOR)

    async def clear(self, method: str) -> bool:
        """Remove a method's override; False when it has none."""
        return await self._count(delete(LANE_OVERRIDES).where(LANE_OVERRIDES.c.method == method)) > 0

    async def _write(self, method: str, lane: Lane, reason: str, source: OverrideSource) -> bool:
        new = insert(self._dialect, LANE_OVERRIDES).values(
            method=method, lane=lane, reason=reason, source=source, marked_at=now()
        )
        is_operators = source == OverrideSource.OPERATOR
        may_replace = (LANE_OVERRIDES.c.source == OverrideSource.WATCHDOG) | is_operators
        statement = new.on_conflict_do_update(
            index_elements=[LANE_OVERRIDES.c.method],
            set_={name: new.excluded[name] for name in ("lane", "reason", "source", "marked_at")},
            where=may_replace,
        ).returning(LANE_OVERRIDES.c.method)
        return await self._scalar(statement) is not None


@dataclass(frozen=True, kw_only=True)
class PluginState:
    """The newest decision about one plugin."""

    plugin_key: str
    is_enabled: bool
    #: Number of decisions.
    revision: int
    #: The newest revision for which the plugin's hooks ran; 0: none.
    announced_revision: int
    changed_at: datetime


class PluginStateRepository(Repository):
    """Rows of decisions, at most one per plugin."""

    async def set(self, plugin_key: str, *, is_enabled: bool) -> bool:
        """Record a decision; False when the plugin was in that state already, as it is without a row."""
        if is_enabled:
            disabled = (PLUGIN_STATES.c.plugin_key == plugin_key) & ~PLUGIN_STATES.c.is_enabled
            statement = (
                update(PLUGIN_STATES)
                .where(disabled)
                .values(is_enabled=True, revision=PLUGIN_STATES.c.revision + 1, changed_at=now())
            )
            return await self._count(statement) > 0
        new = insert(self._dialect, PLUGIN_STATES).values(
            plugin_key=plugin_key, is_enabled=False, revision=1, announced_revision=0, changed_at=now()
        )
        upsert = new.on_conflict_do_update(
            index_elements=[PLUGIN_STATES.c.plugin_key],
            set_={
                "is_enabled": False,
                "revision": PLUGIN_STATES.c.revision + 1,
                "changed_at": new.excluded.changed_at,
            },
            where=PLUGIN_STATES.c.is_enabled.is_(True),
        ).returning(PLUGIN_STATES.c.plugin_key)
        return await self._scalar(upsert) is not None

    async def all(self) -> list[PluginState]:
        """List every decision, ordered by plugin."""
        return await self._all(PluginState, _states_statement)

    async def announced(self, plugin_key: str, *, revision: int) -> None:
        """Record that the plugin's hooks ran for a revision."""
        await self._count(
            update(PLUGIN_STATES)
            .where(PLUGIN_STATES.c.plugin_key == plugin_key, PLUGIN_STATES.c.announced_revision < revision)
            .values(announced_revision=revision)
        )


@FixedStatement
def _states_statement(_dialect: str) -> Executable:
    return select(PLUGIN_STATES).order_by(PLUGIN_STATES.c.plugin_key)


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
        text = await self._scalar(GET, {"of_digest": _digest(chat_key)})
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
            await self._scalar(DELETE, {"of_digest": digest})
            return
        value = json.dumps({key: vars(found) for key, found in sorted(activations.items())})
        await self._scalar(SET, {"digest": digest, **_keys(chat_key), "value": value})

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


def _keys(chat_key: str) -> dict[str, str]:
    return dict(zip(SCOPE, (BUILT_IN_PLUGIN, chat_key, "", _STORE_KEY), strict=True))


def _digest(chat_key: str) -> bytes:
    return value_digest(*_keys(chat_key).values())


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
