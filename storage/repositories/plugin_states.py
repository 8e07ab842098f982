"""What plugins store, and what operators, the watchdog and chats decide on plugins.

A digest identifies a stored value. Decisions are lanes of methods, states and activations. Activations say
which plugins of a chat are awake although they may sleep, and for how many turns. Those of a chat are one
value among those of the plugins, under the key of the built-in methods, which no plugin has."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final

from sqlalchemy import Executable, Integer, bindparam, delete, func, literal_column, select, update

from nekro_agent.errors import InvalidValueError
from nekro_agent.methods import BUILT_IN_PLUGIN, Lane
from nekro_agent.store import MAX_KEY_CHARS
from storage.driver.statements import FixedStatement, SingleStatement
from storage.repositories.base import Repository
from storage.sql import insert, now
from storage.states import OverrideSource, RoundState
from storage.tables import LANE_OVERRIDES, PLUGIN_STATES, PLUGIN_VALUES, ROUNDS

__all__ = [
    "DELETE",
    "GET",
    "SCOPE",
    "SET",
    "Activation",
    "ActivationRepository",
    "LaneOverrideRepository",
    "PluginState",
    "PluginStateRepository",
    "value_digest",
]


#: The keys, in the order of the digest.
SCOPE: Final = ("plugin_key", "chat_key", "user_key", "store_key")

_pack_length: Final = struct.Struct(">Q").pack
#: Size of the digest cache: plugins reuse keys, and a digest takes a tenth of the time of reading a value.
_KNOWN_DIGESTS: Final = 4096


@lru_cache(_KNOWN_DIGESTS)
def value_digest(*keys: str) -> bytes:
    """Return SHA-256 of the four keys, each after its length, so that no two scopes are encoded alike."""
    parts: list[bytes] = []
    for name, key in zip(SCOPE, keys, strict=True):
        if len(key) > MAX_KEY_CHARS:
            raise InvalidValueError(f"{name} has {len(key)} characters, the limit is {MAX_KEY_CHARS}")
        encoded = key.encode("utf-8", "surrogatepass")
        parts.append(_pack_length(len(encoded)))
        parts.append(encoded)
    return hashlib.sha256(b"".join(parts)).digest()


def _get(_dialect: str) -> Executable:
    return select(PLUGIN_VALUES.c.value).where(PLUGIN_VALUES.c.digest == bindparam("of_digest"))


def _delete(_dialect: str) -> Executable:
    found = PLUGIN_VALUES.c.digest == bindparam("of_digest")
    return delete(PLUGIN_VALUES).where(found).returning(PLUGIN_VALUES.c.revision)


def _set(dialect: str) -> Executable:
    given = ("digest", *SCOPE, "value")
    new = insert(dialect, PLUGIN_VALUES).values(
        {
            **{name: bindparam(name) for name in given},
            "revision": literal_column("1"),
            "created_at": now(),
            "updated_at": now(),
        }
    )
    return new.on_conflict_do_update(
        index_elements=[PLUGIN_VALUES.c.digest],
        set_={
            "value": new.excluded.value,
            "revision": PLUGIN_VALUES.c.revision + literal_column("1"),
            "updated_at": new.excluded.updated_at,
        },
    ).returning(PLUGIN_VALUES.c.revision)


#: Returns the value of a digest.
GET: Final = SingleStatement(_get, writes=False)
#: Writes a row; returns its revision.
SET: Final = SingleStatement(_set, writes=True)
#: Deletes the row of a digest; returns its revision.
DELETE: Final = SingleStatement(_delete, writes=True)


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
    #: The plugin's hooks ran for all revisions up to this one; 0: for none.
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
