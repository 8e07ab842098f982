"""Recurring timers: trigger a chat's agent by a cron expression."""

from __future__ import annotations

import dataclasses
import secrets
import string
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal

from nekro_agent import cron, runtime
from nekro_agent.errors import ConflictError, InvalidValueError, NotFoundError
from nekro_agent.ports import CronJob, WorkdayMode
from nekro_agent.shared_clock import shared_time

__all__ = [
    "CronJob",
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
) -> CronJob:
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
    mode = _checked_mode(workday_mode)
    expression = cron.checked_expression(cron_expr)
    for length in _ID_LENGTHS:
        job = CronJob(
            job_id="".join(secrets.choice(_ALPHABET) for _ in range(length)),
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
        if await runtime.current().service("cron_jobs").add(job):
            return job
    raise ConflictError("no free id for a recurring timer was found; try again")


async def update_job(
    job_id: str,
    *,
    cron_expr: str | None = None,
    event_desc: str | None = None,
    timezone: str | None = None,
    workday_mode: str | None = None,
    title: str | None = None,
) -> CronJob:
    """Change a job; None leaves a value unchanged. A paused job stays paused.

    Raises:
        NotFoundError: there is no such job.
        InvalidValueError: a value is wrong.
    """

    def changed(job: CronJob) -> CronJob:
        return dataclasses.replace(
            job,
            cron_expr=job.cron_expr if cron_expr is None else cron.checked_expression(cron_expr),
            event_desc=job.event_desc if event_desc is None else event_desc,
            timezone=job.timezone if timezone is None else timezone,
            workday_mode=job.workday_mode if workday_mode is None else _checked_mode(workday_mode),
            title=job.title if title is None else title,
        )

    return await _change(job_id, lambda job: _scheduled(changed(job), paused=job.next_fire_at is None))


async def get_job(job_id: str) -> CronJob | None:
    """Return a job, or None."""
    return await runtime.current().service("cron_jobs").get(job_id)


async def delete_job(job_id: str) -> bool:
    """Delete a job; False if there was none."""
    return await runtime.current().service("cron_jobs").delete(job_id)


async def pause_job(job_id: str) -> CronJob:
    """Stop a job from firing until it is resumed.

    Raises:
        NotFoundError: there is no such job.
    """
    return await _change(job_id, lambda job: _scheduled(job, paused=True))


async def resume_job(job_id: str) -> CronJob:
    """Let a paused job fire again from its next due time.

    Raises:
        NotFoundError: there is no such job.
    """
    return await _change(job_id, lambda job: _scheduled(job, paused=False))


async def run_now(job_id: str) -> bool:
    """Fire a job once, independently of its schedule; False if there is none."""
    return await runtime.current().service("cron_jobs").run_now(job_id)


async def list_jobs(chat_key: str, status: Literal["active", "paused", ""] | None = None) -> list[CronJob]:
    """Return a chat's jobs, oldest first; only those of ``status`` if it is given."""
    jobs = await runtime.current().service("cron_jobs").of_chat(chat_key)
    return [job for job in jobs if not status or job.status == status]


async def get_job_summary(
    chat_key: str, upcoming_limit: int = 5, recent_limit: int = 5
) -> tuple[int, int, list[CronJob], list[CronJob]]:
    """Return the numbers of active and paused jobs, the jobs due next, and those that fired last."""
    jobs = await list_jobs(chat_key)
    active = [job for job in jobs if job.next_fire_at is not None]
    upcoming = sorted(active, key=lambda job: _moment(job.next_fire_at))
    fired = [job for job in jobs if job.last_fired_at is not None]
    recent = sorted(fired, key=lambda job: _moment(job.last_fired_at), reverse=True)
    return len(active), len(jobs) - len(active), upcoming[:upcoming_limit], recent[:recent_limit]


def get_job_id(job: CronJob) -> str:
    """Return the id of a job."""
    return job.job_id


def validate_cron_expr(cron_expr: str) -> str:
    """Return the expression in normalised form.

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


async def _change(job_id: str, change: Callable[[CronJob], CronJob]) -> CronJob:
    jobs = runtime.current().service("cron_jobs")
    job = await jobs.get(job_id)
    if job is None:
        raise NotFoundError(f"there is no recurring timer {job_id!r}")
    new = change(job)
    if not await jobs.replace(new):
        raise NotFoundError(f"there is no recurring timer {job_id!r} any more")
    return new


def _scheduled(job: CronJob, *, paused: bool) -> CronJob:
    now = shared_time()
    due = (
        None
        if paused
        else cron.next_fire(job.cron_expr, timezone=job.timezone, workday_mode=job.workday_mode, after=now)
    )
    return dataclasses.replace(job, next_fire_at=due, updated_at=now)


def _checked_mode(mode: str) -> WorkdayMode:
    try:
        return WorkdayMode(mode or "none")
    except ValueError:
        choices = ", ".join(WorkdayMode)
        raise InvalidValueError(f"workday_mode {mode!r} does not exist; use one of {choices}") from None


def _moment(value: datetime | None) -> datetime:
    return value or datetime.min.replace(tzinfo=UTC)
