"""Calls that are shown as jobs: those that report progress, and those whose callers no longer wait.

The row of such a call in ``jobs`` has no job function: it is never claimed and its ``args`` are NULL. It ends
with its call, or when its lease expires because the call's worker died. The result of a detached call, which
has a row in ``calls`` too, goes to the chat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import case, func, literal, select

from nekro_agent.errors import FencedError
from storage.repositories.base import Repository, found, is_one_of, values_of
from storage.repositories.calls import Call, CallRequest
from storage.repositories.jobs import JobRepository
from storage.sql import insert, now, seconds_from_now
from storage.states import CallState, CrashPolicy, JobState
from storage.tables import CALLS, JOBS

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert

__all__ = ["CallProgress", "CallProgressRepository", "DetachedCallRepository"]

_OPEN: Final = (CallState.QUEUED, CallState.RUNNING)


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

    async def begin(self, progress: CallProgress) -> bool:
        """Record that a call runs; False if it has a row, which is not changed."""
        new = self._insert(progress).on_conflict_do_nothing(index_elements=[JOBS.c.id])
        return await self._scalar(new.returning(JOBS.c.id)) is not None

    async def show(self, progress: CallProgress) -> None:
        """Record the progress of a call; the row of a call that has ended is not changed."""
        new = self._insert(progress)
        newer = {
            name: new.excluded[name] for name in ("percent", "message", "worker", "lease_until", "updated_at")
        }
        await self._connection.execute(
            new.on_conflict_do_update(
                index_elements=[JOBS.c.id], set_=newer, where=JOBS.c.state == JobState.RUNNING
            )
        )

    def _insert(self, progress: CallProgress) -> Insert:
        return insert(self._dialect, JOBS).values(
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


class DetachedCallRepository(Repository):
    """Rows of ``calls`` that are detached or may become so.

    Caller and worker each update the same row with one statement, and the second one sees the first: either
    the caller sees that the call has ended, or the worker sees that the result must go to the chat.
    """

    async def detach(self, request: CallRequest, *, runs_seconds: float | None = None) -> Call:
        """Record that the caller no longer waits; returns the call's current row, which may have ended.

        Args:
            request: the call with its ``invocation``, which names the chat to notify; inserted if it has
                no row.
            runs_seconds: how long a call that no worker claims may run; None for a call that is claimed.
        """
        claimless = runs_seconds is not None
        new = insert(self._dialect, CALLS).values(
            **values_of(request, CallRequest),
            state=CallState.RUNNING if claimless else CallState.QUEUED,
            lease_until=seconds_from_now(runs_seconds) if runs_seconds is not None else None,
            requested_at=now(),
            published_at=now(),
            detached_at=now(),
        )
        statement = new.on_conflict_do_update(
            index_elements=[CALLS.c.id],
            set_={
                "detached_at": func.coalesce(CALLS.c.detached_at, now()),
                # A recorded call already has its complete message, which the sweep publishes again.
                "invocation": func.coalesce(CALLS.c.invocation, new.excluded.invocation),
            },
            where=is_one_of(CALLS.c.state, *_OPEN),
        ).returning(CALLS)
        return await self._one_or_none(Call, statement) or found(
            await self._one_or_none(Call, select(CALLS).where(CALLS.c.id == request.id)),
            "call",
            request.id,
        )

    async def end(
        self,
        request: CallRequest,
        *,
        state: CallState,
        outcome: dict[str, Any] | None = None,
        error_type: str | None = None,
        error_message: str | None = None,
    ) -> Call | None:
        """Record the end of an unclaimed call that may be detached.

        Returns None if it has ended already, or a worker has claimed it: its claim records the end.

        Args:
            outcome: kept if the call is detached; else its caller gets it.
        """
        values = {
            "state": state,
            "error_type": error_type,
            "error_message": error_message,
            "finished_at": now(),
            "lease_until": None,
        }
        kept = literal(outcome, CALLS.c.outcome.type)
        new = insert(self._dialect, CALLS).values(
            **values_of(request, CallRequest), **values, requested_at=now()
        )
        statement = new.on_conflict_do_update(
            index_elements=[CALLS.c.id],
            set_={**values, "outcome": case((CALLS.c.detached_at.is_not(None), kept))},
            where=is_one_of(CALLS.c.state, *_OPEN)
            & ((CALLS.c.state == CallState.QUEUED) | (CALLS.c.fence == 0)),
        ).returning(CALLS)
        return await self._one_or_none(Call, statement)
