"""The limits of scopes, what was spent, and how much of the budgets of today is used, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

from broker_config.setting_sources import MEASURES
from broker_config.settings import BudgetSettings
from storage.accounts.spendings import PayingKey, ScopeKey, Total
from storage.listings.series import CostSum
from storage.states import BudgetScope
from storage.transaction import Transaction

__all__ = [
    "STORED_BYTES",
    "Budget",
    "BudgetState",
    "CostPage",
    "count_exhausted",
    "day_of",
    "key_limits",
    "limits_of_settings",
    "measures_of",
    "read_budgets",
    "read_costs",
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
    """Return the day (UTC) of a time; spending counts for that day."""
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
    """Return the limits of a key: its own ones, and where it has none those of the settings."""
    own = {} if key is None else {"cost": key.cost_per_day, "tokens": key.tokens_per_day}
    return {**settings.key, **{name: float(limit) for name, limit in own.items() if limit is not None}}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def measures_of(limits: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the limits in the order of ``MEASURES``."""
    return ((name, limits[name]) for name in MEASURES if name in limits)


#: Budgets of one scope and measure that are shown, those with the least left.
_MOST_SHOWN: Final = 50


@dataclass(frozen=True, kw_only=True)
class CostPage:
    """Some sums, and the last group of this page, where the next one continues; None on the last page."""

    sums: Sequence[CostSum]
    after: str | None


async def read_costs(
    transaction: Transaction,
    by: str,
    *,
    since: date | None,
    until: date | None,
    after: str | None,
    limit: int,
    key_id: str | None = None,
) -> CostPage:
    """Sum up what was spent, ordered by the group.

    Args:
        by: day, chat, user, key, plugin or model.
        since, until: days (UTC), both included; None does not limit.
        after: as ``CostPage.after`` of the page before.
        key_id: only what this key pays for; None: everything.
    """
    sums = await transaction.spending_reports.sums(
        by,
        since=None if since is None else since.isoformat(),
        until=None if until is None else until.isoformat(),
        after=after,
        limit=limit + 1,
        key_id=key_id,
    )
    return CostPage(sums=sums[:limit], after=sums[limit - 1].key if len(sums) > limit else None)


async def read_budgets(transaction: Transaction, settings: BudgetSettings, *, day: str) -> list[Budget]:
    """List the budgets of a day that were used, those with the largest share first.

    Budgets of turns are listed only if they are nearly used up, those of the whole system always. Quotas
    of stored bytes belong to no day.
    """
    budgets: list[Budget] = []
    for scope, limits in limits_of_settings(settings).items():
        if scope is BudgetScope.KEY:
            continue
        for measure, limit in measures_of(limits):
            least = limit * settings.warn_at if scope is BudgetScope.TURN else 0.0
            totals = await transaction.spendings.most_used(
                scope, measure, period=day, least=least, limit=_MOST_SHOWN
            )
            budgets += [Budget.of(total, measure, limit) for total in totals]
            if scope is BudgetScope.DAY and not totals:
                budgets.append(Budget.of(ScopeKey.of(scope, "", day=day), measure, limit))
    budgets += await _of_keys(transaction, settings, day=day)
    budgets += await _stored(transaction)
    return sorted(budgets, key=lambda one: (-one.share, one.scope, one.id, one.measure))


async def count_exhausted(
    transaction: Transaction, settings: BudgetSettings, *, day: str
) -> dict[BudgetScope, int]:
    """Count the chats, users and so on whose budget of a day is used up; turns do not count."""
    limits = limits_of_settings(settings)
    counts: dict[BudgetScope, int] = {
        scope: await transaction.spendings.exhausted(scope, measures, period=day)
        for scope, measures in limits.items()
        if scope not in (BudgetScope.TURN, BudgetScope.KEY)
    }
    of_keys = await _of_keys(transaction, settings, day=day)
    if of_keys or BudgetScope.KEY in limits:
        counts[BudgetScope.KEY] = len({one.id for one in of_keys if one.is_exhausted})
    return counts


async def _stored(transaction: Transaction) -> list[Budget]:
    """Return what keys keep stored, those with the largest share of their limit first."""
    of_key = transaction.stored_bytes
    found = [
        Budget(
            scope=BudgetScope.KEY,
            id=key.id,
            measure=STORED_BYTES,
            period="",
            limit=limit,
            used=key.stored_bytes,
        )
        for key in await transaction.keys.all()
        if key.revoked_at is None and key.stored_bytes and (limit := of_key.limit_of(key.stored_bytes_limit))
    ]
    return sorted(found, key=lambda one: -one.share)[:_MOST_SHOWN]


async def _of_keys(transaction: Transaction, settings: BudgetSettings, *, day: str) -> list[Budget]:
    keys = [
        PayingKey(id=key.id, cost_per_day=key.cost_per_day, tokens_per_day=key.tokens_per_day)
        for key in await transaction.keys.all()
        if key.revoked_at is None
    ]
    limited = {key.id: limits for key in keys if (limits := key_limits(settings, key))}
    if not limited:
        return []
    named = [ScopeKey.of(BudgetScope.KEY, key_id, day=day) for key_id in limited]
    return [
        Budget.of(total, measure, limit)
        for total in await transaction.spendings.totals(named)
        for measure, limit in measures_of(limited[total.id])
    ]
