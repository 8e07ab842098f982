"""Background jobs: one worker runs each at a time and reports progress; a dead worker's job is recovered.

    QUEUED ──claim──▶ RUNNING ──finish──▶ SUCCEEDED | FAILED | CANCELLED
       │                 ├──claim (lease expired, it restarts)──▶ RUNNING
       │                 └──fail_orphans (lease expired, it does not)──▶ FAILED | CANCELLED
       └──request_cancel──▶ CANCELLED

A job restarts if its crash policy allows it, no cancellation was requested, and fewer than ``MAX_DEATHS``
workers died while they ran it.

Every write of a worker carries its fencing token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Executable,
    and_,
    bindparam,
    case,
    func,
    literal,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from nekro_agent.errors import FencedError
from storage.driver.statements import ListStatement
from storage.repositories.base import Repository, chosen_once, found, is_one_of, values_of
from storage.repositories.job_log import JobLogRepository, NewJobLogEntry
from storage.repositories.leases import Held, LeaseTable, is_free
from storage.sql import insert, now, seconds_from_now
from storage.states import FINAL_JOB_STATES, CrashPolicy, JobLogKind, JobState, new_id
from storage.tables import JOBS

__all__ = ["JOB_CLAIMS", "MAX_DEATHS", "Job", "JobRepository", "NewJob"]

JOB_CLAIMS: Final = LeaseTable(
    key=JOBS.c.id,
    fence=JOBS.c.fence,
    is_live=(JOBS.c.state == JobState.RUNNING) & JOBS.c.lease_until.is_not(None),
)
_OPEN: Final = (JobState.QUEUED, JobState.RUNNING)
#: Number of workers that may die while they run a job, before it fails.
MAX_DEATHS: Final = 3


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job to add."""

    type: str
    #: The plugin's own name for it; at most one open job per plugin, type and task id.
    task_id: str
    plugin_key: str
    chat_key: str
    #: Plain JSON data: the arguments of the task function.
    args: Any | None = None
    on_crash: CrashPolicy = CrashPolicy.RESTART
    #: The call that started it, with its round and turn; None for a job that no call started.
    call_id: str | None = None
    round_id: str | None = None
    turn_id: str | None = None
    #: The job that it repeats.
    retry_of: str | None = None
    id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class Job(NewJob):
    """A background job."""

    state: JobState
    #: 0 to 100.
    percent: int
    message: str
    data: Any | None
    #: How many times it was started.
    attempt: int
    fence: int
    worker: str | None
    lease_until: datetime | None
    cancel_requested_at: datetime | None
    published_at: datetime | None
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None

    @property
    def is_call(self) -> bool:
        """Whether the row shows the progress of a method's call, whose arguments are not stored."""
        return self.args is None

    @property
    def can_retry(self) -> bool:
        """Whether it may be started again: it failed or was cancelled, and its arguments are stored."""
        return self.state in (JobState.FAILED, JobState.CANCELLED) and not self.is_call


class JobRepository(Repository):
    """Rows of jobs; see the module for the states."""

    async def add(self, job: NewJob) -> Job:
        """Add a job, to be published after the commit.

        Raises:
            ConflictError: the plugin has an open job of that type and task id, or the id is taken.
        """
        values = values_of(job, NewJob)
        statement = (
            insert(self._dialect, JOBS)
            .values(**values, state=JobState.QUEUED, created_at=now(), updated_at=now(), published_at=now())
            .returning(JOBS)
        )
        return found(await self._one_or_none(Job, statement), "job", job.id)

    async def claim(self, job_id: str, *, worker: str, lease_seconds: float) -> Job | None:
        """Start a queued job, or restart one whose worker died; None when the job allows neither.

        The returned job's ``fence`` is the fencing token for all later writes.
        """
        may_start = or_(JOBS.c.state == JobState.QUEUED, and_(_is_orphan(), _restarts()))
        statement = (
            update(JOBS)
            .where(JOBS.c.id == job_id, may_start)
            .values(
                state=JobState.RUNNING,
                worker=worker,
                attempt=JOBS.c.attempt + 1,
                fence=JOBS.c.fence + 1,
                lease_until=seconds_from_now(lease_seconds),
                started_at=func.coalesce(JOBS.c.started_at, now()),
                updated_at=now(),
            )
            .returning(JOBS)
        )
        job = await self._one_or_none(Job, statement)
        if job is not None:
            await self._note(job, JobLogKind.STARTED, worker=worker)
        return job

    async def stop_requests(self, held: Collection[Held]) -> dict[Held, bool]:
        """Whether the cancellation of each job was requested; jobs whose claim was lost are left out."""
        statement = select(JOBS.c.id, JOBS.c.fence, JOBS.c.cancel_requested_at.is_not(None)).where(
            tuple_(JOBS.c.id, JOBS.c.fence).in_(held), JOBS.c.state == JobState.RUNNING
        )
        return {(row[0], row[1]): row[2] for row in await self._connection.execute(statement)}

    async def release(self, job_id: str, *, fence: int) -> Job:
        """End the claim of a job that another worker shall continue; the claim cannot be renewed any more.

        Raises:
            FencedError: another worker has the claim, or the job has ended.
        """
        job = await self._write(job_id, fence, {"lease_until": now(), "fence": JOBS.c.fence + 1})
        await self._note(job, JobLogKind.RELEASED)
        return job

    async def restart(self, job_id: str, *, fence: int, message: str) -> bool:
        """End the claim of a job that failed and shall start again; counts like the death of its worker.

        Returns False, without a change, if the job does not restart any more.

        Raises:
            FencedError: as for ``release``.
        """
        is_held = (JOBS.c.id == job_id, JOBS.c.state == JobState.RUNNING, JOBS.c.fence == fence)
        # Without a time, a renewal that is under way cannot revive the claim.
        values = {"lease_until": None, "message": message, "updated_at": now()}
        again = update(JOBS).where(*is_held, _restarts()).values(**values).returning(JOBS)
        job = await self._one_or_none(Job, again)
        if job is not None:
            await self._note(job, JobLogKind.RESTARTED, message)
            return True
        await self._write(job_id, fence, {"updated_at": now()})
        return False

    async def progress(
        self,
        job_id: str,
        *,
        fence: int,
        percent: int,
        message: str,
        data: Any | None = None,
        logged_as: str | None = None,
    ) -> Job:
        """Record the progress of a job.

        Args:
            percent: clamped to 0..100.
            data: None keeps the recorded data.
            logged_as: text of its entry in the job's log; None adds none.

        Raises:
            FencedError: as for ``release``.
        """
        values = {
            "percent": min(100, max(0, percent)),
            "message": message,
            "updated_at": now(),
        }
        job = await self._write(job_id, fence, values if data is None else {**values, "data": data})
        if logged_as is not None:
            await self._note(job, JobLogKind.REPORT, logged_as, percent=job.percent)
        return job

    async def log(self, job_id: str, *lines: tuple[str, str], fence: int) -> None:
        """Add log records of a job's code, as (level, text), to its log.

        Raises:
            FencedError: as for ``release``, if there are any.
        """
        if not lines:
            return
        job = await self._write(job_id, fence, {"updated_at": now()})
        new = [
            NewJobLogEntry(kind=JobLogKind.LINE, attempt=job.attempt, level=level, text=text)
            for level, text in lines
        ]
        await JobLogRepository(self._connection).add(job_id, *new)

    async def finish(
        self, job_id: str, *, fence: int, state: JobState, message: str, data: Any | None = None
    ) -> Job:
        """End a job as SUCCEEDED, FAILED or CANCELLED; notify its chat in the same transaction.

        Raises:
            FencedError: as for ``release``; nothing was written.
        """
        if state not in FINAL_JOB_STATES:
            raise ValueError(f"a job does not finish as {state.value!r}")
        values: dict[str, Any] = {"state": state, "message": message}
        if state is JobState.SUCCEEDED:
            values["percent"] = 100
        if data is not None:
            values["data"] = data
        times = {"finished_at": now(), "updated_at": now(), "lease_until": None}
        job = await self._write(job_id, fence, {**values, **times})
        await self._note(job, JobLogKind(state.value), message)
        return job

    async def request_cancel(self, job_id: str, *, reason: str) -> Job:
        """Cancel a queued job, or request its worker to stop; returns the job's current row.

        Raises:
            NotFoundError: there is no such job.
        """
        waits = JOBS.c.state == JobState.QUEUED
        statement = (
            update(JOBS)
            .where(JOBS.c.id == job_id, is_one_of(JOBS.c.state, *_OPEN))
            .values(
                state=case((waits, JobState.CANCELLED), else_=JOBS.c.state),
                message=case((waits, reason), else_=JOBS.c.message),
                finished_at=case((waits, now()), else_=None),
                cancel_requested_at=func.coalesce(JOBS.c.cancel_requested_at, now()),
                updated_at=now(),
            )
            .returning(JOBS)
        )
        job = await self._one_or_none(Job, statement)
        if job is None:
            return await self.get(job_id)
        kind = JobLogKind.CANCELLED if job.state.is_final else JobLogKind.CANCEL_REQUESTED
        await self._note(job, kind, reason)
        return job

    async def take_orphans(
        self, *, waiting_seconds: float, limit: int, queued_seconds: float | None = None
    ) -> list[Job]:
        """Return jobs to publish again: unclaimed ones, and those that restart because their worker died.

        Args:
            waiting_seconds: how long later sweeps skip a job that was taken.
            queued_seconds: the same for unclaimed jobs, which may only be waiting in a long queue;
                None means ``waiting_seconds``.
        """
        queued = waiting_seconds if queued_seconds is None else queued_seconds
        needs = or_(
            and_(_is_orphan(), _restarts(), _published_before(waiting_seconds)),
            and_(JOBS.c.state == JobState.QUEUED, _published_before(queued)),
        )
        return await self._update_open(needs, limit, {"published_at": now()})

    async def count_queued(self) -> int:
        """Return how many jobs no worker has started."""
        queued = select(func.count()).where(is_one_of(JOBS.c.state, JobState.QUEUED))
        return int(await self._scalar(queued))

    async def fail_orphans(self, *, limit: int) -> list[Job]:
        """End jobs whose worker died and that do not restart; returns them, so that chats can be notified.

        Jobs with a requested cancellation become CANCELLED, the others FAILED.
        """
        is_cancelled = JOBS.c.cancel_requested_at.is_not(None)
        values = {
            "state": case(
                (is_cancelled, literal(JobState.CANCELLED, JOBS.c.state.type)),
                else_=literal(JobState.FAILED, JOBS.c.state.type),
            ),
            "message": case(
                (is_cancelled, "its worker died before it stopped on request"),
                (JOBS.c.on_crash == CrashPolicy.FAIL, "its worker died, and the job does not restart"),
                else_=f"its worker died {MAX_DEATHS} times; not started again",
            ),
            "finished_at": now(),
            "updated_at": now(),
        }
        jobs = await self._update_open(and_(_is_orphan(), not_(_restarts())), limit, values)
        for job in jobs:
            await self._note(job, JobLogKind(job.state.value), job.message)
        return jobs

    async def find(self, job_id: str) -> Job | None:
        """Return the job, or None."""
        return await self._one_or_none(Job, select(JOBS).where(JOBS.c.id == job_id))

    async def get(self, job_id: str) -> Job:
        """Return the job.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(job_id), "job", job_id)

    async def find_latest(self, plugin_key: str, job_type: str, task_id: str) -> Job | None:
        """Return the newest job of that name, open or ended, or None."""
        statement = select(JOBS).where(
            JOBS.c.plugin_key == plugin_key, JOBS.c.type == job_type, JOBS.c.task_id == task_id
        )
        is_open = is_one_of(JOBS.c.state, *_OPEN)
        # The open job first: two jobs created in the same millisecond have equal times.
        newest = statement.order_by(is_open.desc(), JOBS.c.created_at.desc()).limit(1)
        return await self._one_or_none(Job, newest)

    async def of_turn(self, turn_id: str) -> list[Job]:
        """List the jobs that calls of a turn started, the oldest first."""
        return await self._all(Job, _of_turn_statement, {"of_turn": turn_id})

    async def newest(
        self,
        *,
        limit: int,
        chat_key: str | None = None,
        open_only: bool = False,
        beginning: str = "",
        after: str | None = None,
    ) -> list[Job]:
        """List jobs, the newest first.

        Args:
            beginning: only jobs whose ids begin with it.
            after: only jobs that follow the one of this id in the list; none if it was deleted.
        """
        statement = select(JOBS)
        if after is not None:
            last = select(JOBS.c.created_at).where(JOBS.c.id == after).scalar_subquery()
            is_later = (JOBS.c.created_at == last) & (JOBS.c.id > after)
            statement = statement.where((JOBS.c.created_at < last) | is_later)
        if chat_key is not None:
            statement = statement.where(JOBS.c.chat_key == chat_key)
        if open_only:
            statement = statement.where(is_one_of(JOBS.c.state, *_OPEN))
        if beginning:
            statement = statement.where(JOBS.c.id.startswith(beginning, autoescape=True))
        return await self._all(Job, statement.order_by(JOBS.c.created_at.desc(), JOBS.c.id).limit(limit))

    async def _note(self, job: Job, kind: JobLogKind, text: str = "", **values: Any) -> None:
        """Add an entry to a job's log; calls that are shown as jobs have none."""
        if job.args is not None:
            entry = NewJobLogEntry(kind=kind, attempt=job.attempt, text=text, **values)
            await JobLogRepository(self._connection).add(job.id, entry)

    async def _write(self, job_id: str, fence: int, values: dict[str, Any]) -> Job:
        statement = (
            update(JOBS)
            .where(JOBS.c.id == job_id, JOBS.c.state == JobState.RUNNING, JOBS.c.fence == fence)
            .values(**values)
            .returning(JOBS)
        )
        job = await self._one_or_none(Job, statement)
        if job is None:
            raise FencedError(f"job {job_id} does not run under claim {fence}; nothing was written")
        return job

    async def _update_open(
        self, condition: ColumnElement[bool], limit: int, values: dict[str, Any]
    ) -> list[Job]:
        chosen = (
            select(JOBS.c.id)
            .where(is_one_of(JOBS.c.state, *_OPEN), condition)
            .order_by(JOBS.c.created_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        statement = update(JOBS).where(JOBS.c.id.in_(chosen_once(chosen))).values(**values)
        jobs = await self._all(Job, statement.returning(JOBS))
        return sorted(jobs, key=lambda job: job.created_at)


@ListStatement
def _of_turn_statement(_dialect: str) -> Executable:
    is_own = JOBS.c.turn_id == bindparam("of_turn")
    return select(JOBS).where(is_own).order_by(JOBS.c.created_at, JOBS.c.id)


def _is_orphan() -> ColumnElement[bool]:
    return and_(JOBS.c.state == JobState.RUNNING, is_free(JOBS.c.lease_until))


def _restarts() -> ColumnElement[bool]:
    return and_(
        JOBS.c.on_crash == CrashPolicy.RESTART,
        JOBS.c.cancel_requested_at.is_(None),
        # A claim adds 1 to both; a release, whose start does not count, adds 1 to the fence.
        2 * JOBS.c.attempt - JOBS.c.fence < MAX_DEATHS,
    )


def _published_before(seconds: float) -> ColumnElement[bool]:
    return or_(JOBS.c.published_at.is_(None), JOBS.c.published_at < seconds_from_now(-seconds))
