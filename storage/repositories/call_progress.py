"""Progress of method calls, stored as rows of ``jobs``: one per call that reports progress.

Such a row has no job function: it is never claimed and its ``args`` are NULL. It ends with its call,
or when its lease expires because the call's worker died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sqlalchemy.dialects.postgresql import Insert

from nekro_agent.errors import FencedError
from storage.clock import now, seconds_from_now
from storage.models import JobRow
from storage.repositories.base import Repository
from storage.repositories.jobs import JobRepository
from storage.states import CrashPolicy, JobState
from storage.upsert import insert

__all__ = ["CallProgress", "CallProgressRepository"]


@dataclass(frozen=True, kw_only=True)
class CallProgress:
    """The progress of a call."""

    #: Fencing token for ``JobRepository``; constant, because the row is never claimed.
    fence: ClassVar[int] = 1

    call_id: str
    #: The function's name.
    method: str
    plugin_key: str
    chat_key: str
    worker: str
    #: 0 to 100.
    percent: int
    message: str
    #: How long the row stays open without another report.
    lease_seconds: float
    #: None outside rounds.
    round_id: str | None = None
    turn_id: str | None = None


class CallProgressRepository(Repository):
    """Rows of ``jobs`` that represent calls."""

    async def begin(self, progress: CallProgress) -> None:
        """Record that a call runs; an existing row is not changed."""
        new = self._insert(progress)
        await self._connection.execute(new.on_conflict_do_nothing(index_elements=[JobRow.id]))

    async def show(self, progress: CallProgress) -> None:
        """Record the progress of a call; the row of a call that has ended is not changed."""
        new = self._insert(progress)
        newer = {
            name: new.excluded[name] for name in ("percent", "message", "worker", "lease_until", "updated_at")
        }
        await self._connection.execute(
            new.on_conflict_do_update(
                index_elements=[JobRow.id], set_=newer, where=JobRow.state == JobState.RUNNING
            )
        )

    def _insert(self, progress: CallProgress) -> Insert:
        return insert(self._dialect, JobRow).values(
            id=progress.call_id,
            type=progress.method,
            task_id=progress.call_id,
            plugin_key=progress.plugin_key,
            chat_key=progress.chat_key,
            call_id=progress.call_id,
            round_id=progress.round_id,
            turn_id=progress.turn_id,
            state=JobState.RUNNING,
            on_crash=CrashPolicy.FAIL,
            percent=progress.percent,
            message=progress.message,
            attempt=1,
            fence=progress.fence,
            worker=progress.worker,
            lease_until=seconds_from_now(progress.lease_seconds),
            created_at=now(),
            started_at=now(),
            updated_at=now(),
        )

    async def end(self, progress: CallProgress, *, state: JobState) -> None:
        """Record the end of a call; the row of a call that has ended is not changed."""
        await self.show(progress)
        try:
            await JobRepository(self._connection).finish(
                progress.call_id, fence=progress.fence, state=state, message=progress.message
            )
        except FencedError:  # it has ended, by another delivery or because its lease expired
            return
