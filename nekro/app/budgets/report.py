"""What was spent, and how much of the budgets of today is used, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

from broker_config.settings import BudgetSettings
from nekro.app.budgets.limits import STORED_BYTES, Budget, key_limits, limits_of_settings, measures_of
from storage.access.spending_reports import CostSum
from storage.access.spendings import PayingKey, ScopeKey
from storage.states import BudgetScope
from storage.transaction import Transaction

__all__ = ["CostPage", "count_exhausted", "read_budgets", "read_costs"]

#: Budgets of one scope and measure that are shown, those with the least left.
_MOST_SHOWN: Final = 50


@dataclass(frozen=True, kw_only=True)
class CostPage:
    """Some sums, and the group after which the next page begins; None after the last one."""

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

    Of turns only those that are nearly used up. The whole system's are listed in any case. What keys keep
    stored is of no day.
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
