"""Computes when a recurring timer fires next."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterBadDateError, croniter

from nekro_agent.errors import InvalidValueError
from nekro_agent.ports import CronJob, WorkdayMode
from nekro_agent.shared_clock import shared_time

__all__ = ["checked_expression", "checked_mode", "checked_timezone", "next_fire", "scheduled"]

_HORIZON: Final = timedelta(days=366 * 8)
#: Longer than five full lists of numbers.
_MOST_CHARS: Final = 500
_WORKDAYS: Final = {WorkdayMode.MON_FRI, WorkdayMode.CN_WORKDAY}
_RESTDAYS: Final = {WorkdayMode.WEEKEND, WorkdayMode.CN_RESTDAY}


def checked_expression(cron_expr: str) -> str:
    """Return a five-field cron expression with single spaces.

    Raises:
        InvalidValueError: it does not have five fields, is too long, or one of them is invalid.
    """
    fields = cron_expr.split() if isinstance(cron_expr, str) and len(cron_expr) <= _MOST_CHARS else []
    text = " ".join(fields)
    if len(fields) != 5 or not croniter.is_valid(text):
        raise InvalidValueError(
            f"cron expression {str(cron_expr)[:_MOST_CHARS]!r} is not valid: minute, hour, day of month, "
            'month, day of week, for example "0 9 * * 1-5"'
        )
    return text


def checked_timezone(name: str) -> ZoneInfo:
    """Return the time zone of an IANA name.

    Raises:
        InvalidValueError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as exc:
        raise InvalidValueError(
            f"time zone {name!r} does not exist; use an IANA name like Asia/Tokyo"
        ) from exc


def next_fire(cron_expr: str, *, timezone: str, workday_mode: WorkdayMode, after: datetime) -> datetime:
    """Return the first due time after ``after``, in UTC.

    Days are those of ``timezone``, including daylight saving time: a time that is skipped is due when the
    clock goes on, and of an hour that is repeated the first is due, or both if every hour is.

    Raises:
        InvalidValueError: expression or zone is invalid, or there is no due time within eight years.
    """
    zone = checked_timezone(timezone)
    start = after.astimezone(zone)
    expression = checked_expression(cron_expr)
    times, names_every_hour = croniter(expression, start), expression.split()[1].startswith("*")
    while True:
        try:
            due: datetime = times.get_next(datetime)
        except CroniterBadDateError as exc:
            raise InvalidValueError(f"cron expression {cron_expr!r} never fires") from exc
        if due - start > _HORIZON:
            raise InvalidValueError(f"cron expression {cron_expr!r} with {workday_mode} never fires")
        if not _is_wanted(due, workday_mode):
            times.set_current(_end_of_unwanted_days(due))
        elif not due.fold or names_every_hour:  # ``fold``: the clock shows this time for the second time
            return due.astimezone(UTC)


def scheduled(job: CronJob, *, paused: bool) -> CronJob:
    """Return a job with its next due time from now on, or without one while it is paused.

    Raises:
        InvalidValueError: as for :func:`next_fire`.
    """
    now = shared_time()
    mode = job.workday_mode
    due = None if paused else next_fire(job.cron_expr, timezone=job.timezone, workday_mode=mode, after=now)
    return dataclasses.replace(job, next_fire_at=due, updated_at=now)


def checked_mode(mode: str) -> WorkdayMode:
    """Return the workday mode of a name; ``""`` is ``none``.

    Raises:
        InvalidValueError: there is none.
    """
    try:
        return WorkdayMode(mode or "none")
    except ValueError:
        choices = ", ".join(WorkdayMode)
        raise InvalidValueError(f"workday_mode {mode!r} does not exist; use one of {choices}") from None


def _is_wanted(due: datetime, mode: WorkdayMode) -> bool:
    weekend = _is_weekend(due)
    return not (weekend and mode in _WORKDAYS) and not (not weekend and mode in _RESTDAYS)


def _is_weekend(moment: datetime) -> bool:
    return moment.weekday() >= 5


def _end_of_unwanted_days(due: datetime) -> datetime:
    """Return the last second of the weekend, or of the days from Monday to Friday, of a due time."""
    days = (6 if _is_weekend(due) else 4) - due.weekday()
    # The second time if the clock is set back at midnight: the search goes on behind it.
    return datetime.combine(due.date() + timedelta(days=days), time(23, 59, 59), due.tzinfo).replace(fold=1)
