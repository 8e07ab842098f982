"""The model of recurring timers that plugins of the reference query."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any, Self

from nekro_agent import cron, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.models.base import QueryModel, stable_id
from nekro_agent.ports import CronJob

__all__ = ["DBRecurringTimerJob"]


class DBRecurringTimerJob(QueryModel):
    """A recurring timer of a chat; ``nekro_agent.api.recurring_timer`` creates and changes them."""

    _changeable = frozenset(("title", "event_desc", "cron_expr", "timezone", "workday_mode", "status"))
    _record_names = QueryModel._record_names | {"next_run_at": "next_fire_at", "last_run_at": "last_fired_at"}

    id: int = 0
    job_id: str
    chat_key: str
    title: str | None = None
    event_desc: str
    cron_expr: str
    #: IANA name.
    timezone: str
    #: See ``nekro_agent.ports.WorkdayMode``.
    workday_mode: str = "none"
    #: ``active`` or ``paused``.
    status: str = "active"
    #: None while paused.
    next_run_at: datetime | None = None
    last_run_at: datetime | None = None
    #: A due time that passed while no worker ran fires once.
    misfire_policy: str = "fire_once"
    misfire_grace_seconds: int = 300
    #: A firing is recorded in one transaction, so there are no failures to count.
    consecutive_failures: int = 0
    last_error: str | None = None
    paused_notice_sent_at: datetime | None = None
    create_time: datetime
    update_time: datetime

    @property
    def next_fire_at(self) -> datetime | None:
        """The same as ``next_run_at``."""
        return self.next_run_at

    @property
    def last_fired_at(self) -> datetime | None:
        """The same as ``last_run_at``."""
        return self.last_run_at

    @property
    def created_at(self) -> datetime:
        """The same as ``create_time``."""
        return self.create_time

    @property
    def updated_at(self) -> datetime:
        """The same as ``update_time``."""
        return self.update_time

    @classmethod
    def of(cls, job: CronJob) -> Self:
        """Build it from the port's value."""
        return cls._of(job, id=stable_id(job.job_id), workday_mode=job.workday_mode.value)

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        jobs = runtime.current().service("cron_jobs")
        if isinstance(equal.get("job_id"), str):
            one = await jobs.get(equal["job_id"])
            return [cls.of(one)] if one else []
        return [cls.of(job) for job in await jobs.of_chat(equal.get("chat_key"))]

    async def _insert(self) -> Self:
        raise InvalidValueError(
            "create recurring timers with nekro_agent.api.recurring_timer.create_cron_job"
        )

    async def _update(self, changes: dict[str, Any]) -> None:
        jobs = runtime.current().service("cron_jobs")
        job = await jobs.get(self.job_id)
        if job is None:
            return
        status = changes.pop("status", job.status)
        if status not in ("active", "paused"):
            raise InvalidValueError(f"status {status!r} does not exist; use 'active' or 'paused'")
        if "workday_mode" in changes:
            changes["workday_mode"] = cron.checked_mode(changes["workday_mode"])
        if "cron_expr" in changes:
            changes["cron_expr"] = cron.checked_expression(changes["cron_expr"])
        new = cron.scheduled(dataclasses.replace(job, **changes), paused=status == "paused")
        await jobs.replace(new)
        self.next_run_at, self.update_time = new.next_fire_at, new.updated_at
        self._keep()

    async def _remove(self) -> bool:
        return await runtime.current().service("cron_jobs").delete(self.job_id)
