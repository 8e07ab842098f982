"""The limits of scopes, and how budgets read for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from broker_config.setting_sources import MEASURES
from broker_config.settings import BudgetSettings
from storage.access.spendings import PayingKey, ScopeKey, Total
from storage.states import BudgetScope

__all__ = [
    "STORED_BYTES",
    "Budget",
    "BudgetState",
    "day_of",
    "key_limits",
    "limits_of_settings",
    "measures_of",
    "renewal_of",
]

#: Whose budget it is, for people.
_OWNERS: Final[Mapping[str, str]] = {
    BudgetScope.TURN: "the budget of this request",
    BudgetScope.CHAT: "the budget of this chat for today",
    BudgetScope.USER: "your budget for today",
    BudgetScope.KEY: "the budget of the API key for today",
    BudgetScope.PLUGIN: "the budget of this plugin for today",
    BudgetScope.DAY: "the budget of the whole system for today",
}


#: Measures of what models used.
_OF_MODELS: Final = ("tokens", "cost")
#: Measure of what a key keeps stored, which no period renews.
STORED_BYTES: Final = "stored_bytes"


class BudgetState:
    """States of a budget."""

    OK: Final = "ok"
    WARNED: Final = "warned"
    EXHAUSTED: Final = "exhausted"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One limit of one scope, and what was used of it, estimates of running work included."""

    scope: str
    id: str
    measure: str
    #: ISO date (UTC); "" for a turn.
    period: str
    limit: float
    used: float
    #: Requests whose part of ``used`` is an estimate.
    estimated_requests: int = 0

    @classmethod
    def of(cls, total: Total | ScopeKey, measure: str, limit: float) -> Budget:
        """Return a limit of a total; nothing was used of one that has no row yet."""
        counted = total if isinstance(total, Total) else None
        return cls(
            scope=total.scope,
            id=total.id,
            measure=measure,
            period=total.period,
            limit=limit,
            used=0.0 if counted is None else float(getattr(counted, measure)),
            estimated_requests=counted.estimated_requests if counted and measure in _OF_MODELS else 0,
        )

    @property
    def share(self) -> float:
        """The used part; 1 for a limit of 0."""
        return self.used / self.limit if self.limit else 1.0

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more may begin."""
        return self.used >= self.limit

    def state(self, warn_at: float) -> str:
        """Return a value of ``BudgetState``."""
        if self.is_exhausted:
            return BudgetState.EXHAUSTED
        return BudgetState.WARNED if warn_at < 1 and self.share >= warn_at else BudgetState.OK

    @property
    def renews_at(self) -> datetime | None:
        """When it begins anew; None for a turn."""
        return renewal_of(self.period)

    @property
    def used_up(self) -> str:
        """A sentence without a full stop that says that it is used up."""
        return f"{_OWNERS[self.scope]} is used up ({self._figures}); {self._renewal}"

    @property
    def warning(self) -> str:
        """A message that says how much is used."""
        share = f"{min(self.share, 1):.0%}"
        return f"Note: {share} of {_OWNERS[self.scope]} is used ({self._figures}); {self._renewal}."

    @property
    def _figures(self) -> str:
        return f"{_number(self.used)} of {_number(self.limit)} {MEASURES[self.measure]}"

    @property
    def _renewal(self) -> str:
        if self.renews_at is None:
            return "a new message begins a new one"
        return f"it renews at {self.renews_at:%Y-%m-%d %H:%M} UTC"


def day_of(moment: datetime) -> str:
    """Return the day (UTC) of a time, to which spending is charged."""
    return moment.astimezone(UTC).date().isoformat()


def renewal_of(period: str) -> datetime | None:
    """Return when a budget of a period begins anew; None for a turn."""
    if not period:
        return None
    return datetime.fromisoformat(period).replace(tzinfo=UTC) + timedelta(days=1)


def limits_of_settings(settings: BudgetSettings) -> dict[BudgetScope, Mapping[str, float]]:
    """Return the limits of each scope that has some."""
    named = {
        BudgetScope.TURN: settings.turn,
        BudgetScope.CHAT: settings.chat,
        BudgetScope.USER: settings.user,
        BudgetScope.KEY: settings.key,
        BudgetScope.DAY: settings.day,
    }
    return {scope: limits for scope, limits in named.items() if limits}


def key_limits(settings: BudgetSettings, key: PayingKey | None) -> dict[str, float]:
    """Return the limits of a key: its own ones, and those of the settings for what it does not limit."""
    own = {} if key is None else {"cost": key.cost_per_day, "tokens": key.tokens_per_day}
    return {**settings.key, **{name: float(limit) for name, limit in own.items() if limit is not None}}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def measures_of(limits: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the limits in the order of ``MEASURES``."""
    return ((name, limits[name]) for name in MEASURES if name in limits)
