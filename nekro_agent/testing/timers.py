"""Timers in memory; a test fires them explicitly."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from nekro_agent.ports import CronJob, TimerInfo
from nekro_agent.testing.messages import InMemoryMessages

__all__ = ["InMemoryCronJobs", "InMemoryTimers"]


class InMemoryTimers:
    """Implements ``Timers``."""

    def __init__(self, messages: InMemoryMessages) -> None:
        self._messages = messages
        self._timers: dict[str, TimerInfo] = {}
        self._count = 0

    async def add(self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool) -> TimerInfo:
        """Add a timer."""
        if temporary:
            await self.clear(chat_key, temporary=True)
        self._count += 1
        timer = TimerInfo(
            id=f"t{self._count}",
            chat_key=chat_key,
            fire_at=fire_at,
            description=description,
            temporary=temporary,
        )
        self._timers[timer.id] = timer
        return timer

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel timers; returns their number."""
        gone = [t.id for t in await self.pending(chat_key) if temporary in (None, t.temporary)]
        for timer_id in gone:
            del self._timers[timer_id]
        return len(gone)

    async def delete(self, timer_id: str) -> bool:
        """Cancel one timer; False if there is none."""
        return self._timers.pop(timer_id, None) is not None

    async def pending(self, chat_key: str) -> list[TimerInfo]:
        """Return the chat's timers, soonest first."""
        own = [timer for timer in self._timers.values() if timer.chat_key == chat_key]
        return sorted(own, key=lambda timer: timer.fire_at)

    async def fire_due(self, now: datetime) -> int:
        """Fire timers that are due at ``now``; returns their number."""
        due = sorted((t for t in self._timers.values() if t.fire_at <= now), key=lambda t: t.fire_at)
        for timer in due:
            del self._timers[timer.id]
            await self._messages.push_system(
                timer.chat_key, timer.description, trigger_agent=True, call_id=None
            )
        return len(due)


class InMemoryCronJobs:
    """Implements ``CronJobs``."""

    def __init__(self, messages: InMemoryMessages) -> None:
        self._messages = messages
        self._jobs: dict[str, CronJob] = {}

    async def add(self, job: CronJob) -> bool:
        """Add a job; False if the id is taken."""
        return self._jobs.setdefault(job.job_id, job) is job

    async def get(self, job_id: str) -> CronJob | None:
        """Return a job, or None."""
        return self._jobs.get(job_id)

    async def replace(self, job: CronJob) -> bool:
        """Replace a job's values."""
        old = self._jobs.get(job.job_id)
        if old is None:
            return False
        self._jobs[job.job_id] = dataclasses.replace(
            job, last_fired_at=old.last_fired_at, created_at=old.created_at
        )
        return True

    async def delete(self, job_id: str) -> bool:
        """Delete a job; True if there was one."""
        return self._jobs.pop(job_id, None) is not None

    async def of_chat(self, chat_key: str | None) -> list[CronJob]:
        """Return the jobs of a chat, or of all chats if it is None, oldest first."""
        return [job for job in self._jobs.values() if chat_key in (None, job.chat_key)]

    async def run_now(self, job_id: str) -> bool:
        """Fire once."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        await self._messages.push_system(job.chat_key, job.event_desc, trigger_agent=True, call_id=None)
        return True
