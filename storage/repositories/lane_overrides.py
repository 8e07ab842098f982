"""Overrides: lanes of methods, by the watchdog or an operator, and states of plugins, by an operator."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Executable, delete, select, update

from nekro_agent.methods import Lane
from storage.clock import now
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository
from storage.states import OverrideSource
from storage.tables import LANE_OVERRIDES, PLUGIN_STATES
from storage.upsert import insert

__all__ = ["LaneOverrideRepository", "PluginState", "PluginStateRepository"]


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
