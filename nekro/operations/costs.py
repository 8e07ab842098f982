"""Costs, budgets, and figures over time."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final

from nekro.app.budgets import Budget, day_of, read_budgets, read_costs
from nekro.operations.actor import Actor, Identity, RefusedError, Scope
from nekro.operations.pages import Cursor, Limit, Moment, Param, cursor_of, text_of
from nekro_agent.shared_clock import shared_time
from nekro_client.models import BudgetUse, Cost, CostGroup, Costs, Series, SeriesPoint
from storage.listings.series import CostSum, SeriesRange
from storage.states import BudgetScope

__all__ = ["budget_answer", "cost_answer", "get_costs", "get_series"]


async def get_costs(
    actor: Actor,
    by: Annotated[CostGroup, Param(description="what the sums are grouped by")] = "day",
    since: Annotated[date | None, Param(description="first day (UTC)")] = None,
    until: Annotated[date | None, Param(description="last day (UTC)")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Costs:
    """Sum up what rounds, runs of code and plugins' requests to models used, ordered by the group.

    The first page also has the budgets of today, those with the least left first. Sums include estimates of
    what is running. A key without the scope `admin` sees what it pays for, and its own budgets.
    """
    own = _paying_key(actor.identity)
    after = None if cursor is None else text_of(cursor)
    settings = actor.services.settings.budgets
    async with actor.services.database.read() as transaction:
        page = await read_costs(
            transaction, by, since=since, until=until, after=after, limit=limit, key_id=own
        )
        budgets = []
        if cursor is None:
            budgets = await read_budgets(transaction, settings, day=day_of(shared_time()))
            if own is not None:
                budgets = [one for one in budgets if (one.scope, one.id) == (BudgetScope.KEY, own)]
    return Costs(
        items=[cost_answer(one) for one in page.sums],
        budgets=[budget_answer(one, warn_at=settings.warn_at) for one in budgets],
        next_cursor=None if page.after is None else cursor_of(page.after),
    )


def _paying_key(identity: Identity) -> str | None:
    """Return the key whose spending an identity may see; None: all spending."""
    if Scope.ADMIN in identity.scopes:
        identity.require_all(Scope.ADMIN)
        return None
    identity.require(Scope.READ)
    return identity.key_id


_HOUR: Final = timedelta(hours=1)

_DAY: Final = timedelta(days=1)
#: Longest range that is shown per hour, and longest range at all.
_LONGEST_HOURLY: Final = timedelta(days=3)

_LONGEST: Final = timedelta(days=92)
#: A day before it can be written.
_FIRST: Final = datetime(1, 1, 2, tzinfo=UTC)
#: Rounds, and entries of what was spent, that one answer counts; see docs/lab/performance.md.
_MOST_ROWS: Final = 50_000


async def get_series(
    actor: Actor,
    since: Annotated[
        Moment | None, Param(description="Default: a day before the end. Begins with its interval.")
    ] = None,
    until: Annotated[Moment | None, Param(description="Default: now.")] = None,
) -> Series:
    """Count what happened per hour, or per day (UTC) in a range of more than 3 and at most 92 days.

    Turns count where they ended, and what was spent where it was asked for, estimates of what is running
    included. A key without the scope `admin` sees what it pays for. The newest 50,000 rounds and entries of
    what was spent are counted; `complete_since` says if there are more.
    """
    own = _paying_key(actor.identity)
    span = _range(since, until or shared_time())
    async with actor.services.database.read() as transaction:
        turns = await transaction.series.turns(span, key_id=own)
        spent = await transaction.series.spent(span, key_id=own)
    figures: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for point in (*turns, *spent):
        figures[point.number] |= {
            name: value for name, value in vars(point).items() if name in SeriesPoint.model_fields
        }
    length = span.interval
    count = -(-(span.until - span.since) // length)  # the last interval may have begun only
    left_out = [one.oldest for one in (*turns[:1], *spent[:1]) if one.rows == span.most_rows]
    return Series(
        interval="hour" if length == _HOUR else "day",
        since=span.since,
        until=span.until,
        complete_since=max(left_out, default=None),
        points=[
            SeriesPoint(begins_at=span.since + number * length, **figures[number]) for number in range(count)
        ],
    )


def _range(since: datetime | None, until: datetime) -> SeriesRange:
    """Return the range, from the begin of the interval in which ``since`` lies."""
    begin = max(until, _FIRST) - _DAY if since is None else since
    if not timedelta() < until - begin <= _LONGEST:
        raise RefusedError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "range_invalid",
            "`since` must be before `until`, by at most 92 days",
        )
    length = _HOUR if until - begin <= _LONGEST_HOURLY else _DAY
    start = begin.replace(minute=0, second=0, microsecond=0)
    if length == _DAY:
        start = start.replace(hour=0)
    return SeriesRange(since=start, until=until, interval=length, most_rows=_MOST_ROWS)


def cost_answer(sums: CostSum) -> Cost:
    """Return what one group used."""
    return Cost(**vars(sums))


def budget_answer(budget: Budget, *, warn_at: float) -> BudgetUse:
    """Return how much of a budget is used.

    Args:
        warn_at: its state is ``warned`` from this share on.
    """
    return BudgetUse(
        scope=budget.scope,
        id=budget.id,
        measure=budget.measure,
        period=budget.period or ("turn" if budget.scope == "turn" else ""),
        limit=budget.limit,
        used=budget.used,
        estimated_requests=budget.estimated_requests,
        renews_at=budget.renews_at,
        state=budget.state(warn_at),
    )
