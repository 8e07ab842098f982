"""Recurring timers: trigger a chat's agent by a cron expression."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal

from nekro_agent import cron, runtime
from nekro_agent.errors import ConflictError, InvalidValueError
from nekro_agent.execution.current import effect_id
from nekro_agent.models.db_recurring_timer_job import DBRecurringTimerJob
from nekro_agent.ports import CronJob
from nekro_agent.shared_clock import shared_time

__all__ = [
    "CronJob",
    "DBRecurringTimerJob",
    "create_cron_job",
    "delete_job",
    "get_job",
    "get_job_id",
    "get_job_summary",
    "list_jobs",
    "pause_job",
    "resume_job",
    "run_now",
    "update_job",
    "validate_cron_expr",
    "validate_timezone",
]

_ALPHABET: Final = string.ascii_lowercase + string.digits
_ID_LENGTHS: Final = range(4, 13)


async def create_cron_job(
    chat_key: str,
    cron_expr: str,
    event_desc: str,
    timezone: str,
    workday_mode: str = "none",
    title: str | None = None,
) -> DBRecurringTimerJob:
    """Create a recurring timer; it survives restarts.

    Args:
        cron_expr: minute, hour, day of month, month, day of week.
        timezone: IANA name.
        workday_mode: ``none``, ``mon_fri``, ``weekend``, ``cn_workday`` or ``cn_restday``.

    Raises:
        InvalidValueError: an argument is wrong, or the expression never fires.
    """
    if not chat_key:
        raise InvalidValueError("create_cron_job: chat_key is empty")
    now = shared_time()
    mode = cron.checked_mode(workday_mode)
    expression = cron.checked_expression(cron_expr)
    digits = _digits(effect_id("recurring timer", chat_key, cron_expr, event_desc))
    for length in _ID_LENGTHS:
        job = CronJob(
            job_id=digits[:length],
            chat_key=chat_key,
            cron_expr=expression,
            timezone=timezone,
            workday_mode=mode,
            title=title,
            event_desc=event_desc,
            next_fire_at=cron.next_fire(expression, timezone=timezone, workday_mode=mode, after=now),
            last_fired_at=None,
            created_at=now,
            updated_at=now,
        )
        jobs = runtime.current().service("cron_jobs")
        if await jobs.add(job):
            return DBRecurringTimerJob.of(job)
        earlier = await jobs.get(job.job_id)
        if earlier is not None and _asked_for(earlier) == _asked_for(job):
            return DBRecurringTimerJob.of(earlier)  # of the same call, whose worker died
    raise ConflictError("no free id for a recurring timer was found; try again")


async def update_job(
    job_id: str,
    *,
    cron_expr: str | None = None,
    event_desc: str | None = None,
    timezone: str | None = None,
    workday_mode: str | None = None,
    title: str | None = None,
) -> DBRecurringTimerJob:
    """Change a job; None leaves a value unchanged. A paused job stays paused.

    Raises:
        InvalidValueError: there is no such job, or a value is wrong.
    """

    def changed(job: CronJob) -> CronJob:
        return dataclasses.replace(
            job,
            cron_expr=job.cron_expr if cron_expr is None else cron.checked_expression(cron_expr),
            event_desc=job.event_desc if event_desc is None else event_desc,
            timezone=job.timezone if timezone is None else timezone,
            workday_mode=job.workday_mode if workday_mode is None else cron.checked_mode(workday_mode),
            title=job.title if title is None else title,
        )

    return await _change(job_id, lambda job: cron.scheduled(changed(job), paused=job.next_fire_at is None))


async def get_job(job_id: str) -> DBRecurringTimerJob:
    """Return a job.

    Raises:
        InvalidValueError: there is no such job.
    """
    return DBRecurringTimerJob.of(await _found(job_id))


async def delete_job(job_id: str) -> bool:
    """Delete a job; False if there was none."""
    return await runtime.current().service("cron_jobs").delete(job_id)


async def pause_job(job_id: str) -> DBRecurringTimerJob:
    """Stop a job from firing until it is resumed.

    Raises:
        InvalidValueError: there is no such job.
    """
    return await _change(job_id, lambda job: cron.scheduled(job, paused=True))


async def resume_job(job_id: str) -> DBRecurringTimerJob:
    """Let a paused job fire again from its next due time.

    Raises:
        InvalidValueError: there is no such job.
    """
    return await _change(job_id, lambda job: cron.scheduled(job, paused=False))


async def run_now(job_id: str) -> bool:
    """Fire a job once, independently of its schedule; False if it is paused.

    Raises:
        InvalidValueError: there is no such job.
    """
    job = await _found(job_id)
    if job.next_fire_at is None:
        return False
    return await runtime.current().service("cron_jobs").run_now(job.job_id)


async def list_jobs(
    chat_key: str, status: Literal["active", "paused", ""] | None = None, limit: int = 50
) -> list[DBRecurringTimerJob]:
    """Return a chat's jobs, the last changed first; only those of ``status`` if it is given.

    Args:
        limit: at most so many.
    """
    jobs = await DBRecurringTimerJob.filter(chat_key=chat_key).order_by("-update_time")
    return [job for job in jobs if not status or job.status == status][: max(0, limit)]


async def get_job_summary(
    chat_key: str, upcoming_limit: int = 5, recent_limit: int = 5
) -> tuple[int, int, list[DBRecurringTimerJob], list[DBRecurringTimerJob]]:
    """Return the numbers of active and paused jobs, the jobs due next, and those that fired last."""
    jobs = await DBRecurringTimerJob.filter(chat_key=chat_key)
    active = [job for job in jobs if job.next_run_at is not None]
    upcoming = sorted(active, key=lambda job: _moment(job.next_fire_at))
    fired = [job for job in jobs if job.last_fired_at is not None]
    recent = sorted(fired, key=lambda job: _moment(job.last_fired_at), reverse=True)
    return len(active), len(jobs) - len(active), upcoming[:upcoming_limit], recent[:recent_limit]


def get_job_id(job: DBRecurringTimerJob) -> str:
    """Return the id of a job."""
    return job.job_id


def validate_cron_expr(cron_expr: str, base_dt: datetime | None = None) -> str:
    """Return the expression in normalised form.

    Args:
        base_dt: accepted for compatibility; whether an expression is valid depends on no time.

    Raises:
        InvalidValueError: it is invalid.
    """
    return cron.checked_expression(cron_expr)


def validate_timezone(timezone: str) -> str:
    """Return the time zone's name.

    Raises:
        InvalidValueError: there is no such zone.
    """
    cron.checked_timezone(timezone)
    return timezone


async def _found(job_id: str) -> CronJob:
    job = await runtime.current().service("cron_jobs").get(job_id.strip())
    if job is None:
        raise InvalidValueError(f"there is no recurring timer {job_id!r}; list_jobs(chat_key) lists them")
    return job


async def _change(job_id: str, change: Callable[[CronJob], CronJob]) -> DBRecurringTimerJob:
    new = change(await _found(job_id))
    if not await runtime.current().service("cron_jobs").replace(new):
        raise InvalidValueError(f"there is no recurring timer {job_id!r} any more")
    return DBRecurringTimerJob.of(new)


def _digits(of_id: str) -> str:
    """Return an id of hexadecimal digits in the alphabet of the ids of recurring timers."""
    number, digits = int(of_id, 16), ""
    for _ in range(_ID_LENGTHS[-1]):
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits


def _asked_for(job: CronJob) -> tuple[object, ...]:
    return (job.chat_key, job.cron_expr, job.timezone, job.workday_mode, job.title, job.event_desc)


def _moment(value: datetime | None) -> datetime:
    return value or datetime.min.replace(tzinfo=UTC)
