"""Figures over time."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query

from nekro.gateway.api.fleet.costs import paying_key
from nekro.gateway.dependencies import IdentityDep, ServicesDep
from nekro.gateway.problems import ProblemError
from nekro.gateway.routing import KeyedRoute
from nekro.gateway.web.paging import Moment
from nekro_agent.shared_clock import shared_time
from nekro_client.models import Series, SeriesPoint
from storage.listings.series import SeriesRange

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["operations"])

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
#: Longest range that is shown per hour, and longest range at all.
_LONGEST_HOURLY: Final = timedelta(days=3)
_LONGEST: Final = timedelta(days=92)
#: A day before it can be written.
_FIRST: Final = datetime(1, 1, 2, tzinfo=UTC)
#: Rounds, and entries of what was spent, that one answer counts; see docs/lab/performance.md.
_MOST_ROWS: Final = 50_000


@router.get("/series")
async def get_series(
    services: ServicesDep,
    identity: IdentityDep,
    since: Annotated[
        Moment | None, Query(description="Default: a day before the end. Begins with its interval.")
    ] = None,
    until: Annotated[Moment | None, Query(description="Default: now.")] = None,
) -> Series:
    """Count what happened per hour, or per day (UTC) in a range of more than 3 and at most 92 days.

    Turns count where they ended, and what was spent where it was asked for, estimates of what is running
    included. A key without the scope `admin` sees what it pays for. The newest 50,000 rounds and entries of
    what was spent are counted; `complete_since` says if there are more.
    """
    own = paying_key(identity)
    span = _range(since, until or shared_time())
    async with services.database.read() as transaction:
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
        raise ProblemError(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "range_invalid",
            "`since` must be before `until`, by at most 92 days",
        )
    length = _HOUR if until - begin <= _LONGEST_HOURLY else _DAY
    start = begin.replace(minute=0, second=0, microsecond=0)
    if length == _DAY:
        start = start.replace(hour=0)
    return SeriesRange(since=start, until=until, interval=length, most_rows=_MOST_ROWS)
