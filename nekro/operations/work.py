"""Background jobs, calls that report progress, detached calls, and timers of chats."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Final

from nekro.operations.actor import Actor, RefusedError, Scope
from nekro.operations.pages import Beginning, Cursor, Limit, OfChat, Param, answer_of, page_of, text_of
from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.ports import CronJob
from nekro_client.models import Job, JobAttempt, JobLog, JobLogEntry, Page, SignalBody, Timer, TimerBody
from storage.repositories.job_log import JobLogEntry as JobLogRow
from storage.repositories.jobs import Job as JobRow
from storage.repositories.timers import RecordedTimer, WorkerTimer
from storage.states import JobLogKind, JobState
from storage.transaction import Transaction

__all__ = [
    "TimerChange",
    "attempts_of",
    "cancel_job",
    "change_stored_timer",
    "change_timer",
    "delete_timer",
    "get_job",
    "get_job_log",
    "id_of",
    "job_answer",
    "list_jobs",
    "list_timers",
    "retry_job",
    "signal_job",
    "timer_answer",
    "timers_after",
]


async def list_jobs(
    actor: Actor,
    chat_key: OfChat = None,
    open_only: Annotated[bool, Param(alias="open", description="only jobs that have not ended")] = False,
    beginning: Beginning = "",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Job]:
    """List background jobs, calls that report progress, and detached calls, the newest first.

    A key without the scope `admin` sees those of its chats; a page of it may be shorter than `limit` although
    another one follows.
    """
    identity = actor.identity
    sees_all = Scope.ADMIN in identity.scopes
    if sees_all:
        identity.require_list(Scope.ADMIN, chat_key=chat_key)
    else:
        identity.require(Scope.READ, chat_key=chat_key)
    async with actor.services.database.read() as transaction:
        rows = await transaction.jobs.newest(
            limit=limit + 1,
            chat_key=chat_key,
            open_only=open_only,
            beginning=beginning,
            after=None if cursor is None else text_of(cursor),
        )
    return page_of(
        rows,
        limit=limit,
        answer=job_answer,
        position=lambda row: row.id,
        is_shown=lambda row: sees_all or (bool(row.chat_key) and identity.has_chat(row.chat_key)),
    )


async def get_job(actor: Actor, job_id: str) -> Job:
    """Show a job."""
    return job_answer(await _readable(actor, job_id))


async def get_job_log(actor: Actor, job_id: str) -> JobLog:
    """Show the attempts at a job, its reports, and what its code logged.

    Secrets of the settings are replaced. A call that is shown as a job has no log.
    """
    row = await _readable(actor, job_id)
    async with actor.services.database.read() as transaction:
        return job_log_answer(await transaction.job_log.of_job(row.id))


async def retry_job(actor: Actor, job_id: str) -> Job:
    """Start a job that failed or was cancelled again, as a new job with the same arguments.

    The new job names the old one in `retry_of`, belongs to the same chat and turn, and the key that asks pays
    for it. 409: the job is open or succeeded, is a call, whose arguments are not kept, or a job of the same
    plugin, type and name is open.
    """
    services, row, new_id = actor.services, await _found(actor, job_id, Scope.ADMIN), actor.once.id

    async def work() -> Job:
        # Imported here, as below: what changes rows also publishes, and lists need no broker's library.
        from nekro.app.jobs import retry_job
        from nekro.operations.admission import require_budget

        await require_budget(services, actor.identity)
        job = await retry_job(
            services.database, services.publisher, row.id, new_id=new_id, account_id=actor.identity.account_id
        )
        async with services.database.begin() as transaction:
            await actor.record(transaction, "job.retry", row.id, {"job": job.id})
        return job_answer(job)

    return await actor.once.run(Job, work)


async def cancel_job(actor: Actor, job_id: str) -> Job:
    """Ask a job to end, or stop a detached call; a job that has ended is returned unchanged."""
    services, row = actor.services, await _found(actor, job_id, Scope.ADMIN)

    async def work() -> Job:
        from nekro.app.jobs import cancel_job

        async with services.database.begin() as transaction:
            await actor.record(transaction, "job.cancel", row.id)
        return job_answer(await cancel_job(services.database, services.publisher, row.id))

    return await actor.once.run(Job, work)


async def signal_job(actor: Actor, job_id: str, body: SignalBody) -> Job:
    """Pass data to a job's ``wait(key)``; it is kept if the job does not wait yet."""
    services, row = actor.services, await _found(actor, job_id, Scope.ADMIN)

    async def work() -> Job:
        from nekro.app.jobs import signal_job

        async with services.database.begin() as transaction:
            await actor.record(transaction, "job.signal", row.id, {"key": body.key})
        if not await signal_job(services.database, row.id, body.key, body.data):
            raise RefusedError(HTTPStatus.CONFLICT, "job_ended", f"job {row.id} has ended")
        return job_answer(row)

    # A job that has taken the signal would take a second one for another.
    return await actor.once.run(Job, work, is_repeatable=False)


async def _readable(actor: Actor, job_id: str) -> JobRow:
    scope = Scope.ADMIN if Scope.ADMIN in actor.identity.scopes else Scope.READ
    return await _found(actor, job_id, scope)


async def _found(actor: Actor, job_id: str, scope: Scope) -> JobRow:
    actor.identity.require(scope)
    async with actor.services.database.read() as transaction:
        row = await transaction.jobs.find(job_id)
    if row is None or not actor.identity.has_chat(row.chat_key):
        raise NotFoundError(f"there is no job {job_id!r}")
    return row


#: States whose names the API has in common with those of calls.
_JOB_STATES: Final[dict[str, str]] = {JobState.SUCCEEDED: "done"}


def job_answer(row: JobRow) -> Job:
    """Return a background job."""
    state = _JOB_STATES.get(row.state, row.state.value)
    return answer_of(Job, row, plugin=row.plugin_key, state=state)


def job_log_answer(entries: Sequence[JobLogRow]) -> JobLog:
    """Return the log of a job, with its attempts."""
    return JobLog(
        attempts=attempts_of(entries),
        entries=[
            JobLogEntry(**vars(one) | {"kind": _JOB_STATES.get(one.kind.value, one.kind.value)})
            for one in entries
        ],
    )


_ENDS: Final = frozenset(
    {
        JobLogKind.RELEASED,
        JobLogKind.RESTARTED,
        JobLogKind.SUCCEEDED,
        JobLogKind.FAILED,
        JobLogKind.CANCELLED,
    }
)


def attempts_of(entries: Sequence[JobLogRow]) -> list[JobAttempt]:
    """Return the attempts in order; one that another follows without an end was lost with its worker."""
    attempts: list[JobAttempt] = []
    for entry in entries:
        is_open = bool(attempts) and attempts[-1].outcome == "running"
        if entry.kind is JobLogKind.STARTED:
            if is_open:
                lost = {"outcome": "lost", "message": "its worker died"}
                attempts[-1] = attempts[-1].model_copy(update=lost)
            attempts.append(
                JobAttempt(
                    number=entry.attempt,
                    worker=entry.worker,
                    started_at=entry.at,
                    outcome="running",
                    last_at=entry.at,
                )
            )
        elif is_open:
            changes: dict[str, object] = {"last_at": entry.at}
            if entry.kind in _ENDS:
                outcome = _JOB_STATES.get(entry.kind.value, entry.kind.value)
                changes |= {"outcome": outcome, "message": entry.text, "ended_at": entry.at}
            attempts[-1] = attempts[-1].model_copy(update=changes)
    return attempts


TimerRow = RecordedTimer | CronJob | WorkerTimer


class TimerChange(StrEnum):
    """What to do with a timer."""

    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"


async def timers_after(
    transaction: Transaction, chat_key: str | None, *, beginning: str = "", after: str = "", limit: int
) -> list[TimerRow]:
    """List the timers that have not ended, of a chat or of all, by id.

    Args:
        beginning: only timers whose ids begin with it.
        after: only timers after the one with this id; "" begins with the first.
    """
    ids = await transaction.timers.open_ids(chat_key, beginning=beginning, after=after, limit=limit)
    found = await timers_of(transaction, ids)
    return [found[timer_id] for timer_id in ids if timer_id in found]


async def timers_of(transaction: Transaction, ids: Collection[str]) -> dict[str, TimerRow]:
    """Return those of some ids whose timers have not ended."""
    found: list[TimerRow] = [
        *await transaction.timers.open_of(ids),
        *await transaction.cron_jobs.of(ids),
        *await transaction.timers.with_callback(ids),
    ]
    return {id_of(timer): timer for timer in found}


async def change_stored_timer(transaction: Transaction, timer: TimerRow, change: TimerChange) -> TimerRow:
    """Change a timer; returns its new state, or its last one if it was deleted.

    Raises:
        NotFoundError: it has fired or was deleted meanwhile.
        ConflictError: it has a callback, so only its plugin can change it.
    """
    if isinstance(timer, WorkerTimer):
        raise ConflictError(
            f"timer {timer.id} calls a function of plugin {timer.plugin_key or 'unknown'} in the memory of "
            f"worker {timer.worker}; only the plugin can change it, and disabling the plugin deletes it"
        )
    if isinstance(timer, CronJob):
        return await _change_recurring(transaction, timer, change)
    return await _change_once(transaction, timer, change)


def id_of(timer: TimerRow) -> str:
    """Return the id of a timer."""
    return timer.job_id if isinstance(timer, CronJob) else timer.id


async def _change_once(transaction: Transaction, timer: RecordedTimer, change: TimerChange) -> RecordedTimer:
    if change is TimerChange.DELETE:
        changed = await transaction.timers.delete(timer.id)
    else:
        changed = await transaction.timers.set_paused(timer.id, change is TimerChange.PAUSE)
    if not changed:
        raise NotFoundError(f"timer {timer.id} has fired meanwhile")
    return timer if change is TimerChange.DELETE else await transaction.timers.get_open(timer.id)


async def _change_recurring(transaction: Transaction, job: CronJob, change: TimerChange) -> CronJob:
    if change is TimerChange.DELETE:
        changed, new = await transaction.cron_jobs.delete(job.job_id), job
    elif (change is TimerChange.PAUSE) == (job.next_fire_at is None):
        return job
    else:
        from nekro_agent import cron  # parses schedules; lists need none of it

        new = cron.scheduled(job, paused=change is TimerChange.PAUSE)
        changed = await transaction.cron_jobs.replace(new)
    if not changed:
        raise NotFoundError(f"timer {job.job_id} was deleted meanwhile")
    return new


async def list_timers(
    actor: Actor,
    chat_key: OfChat = None,
    beginning: Beginning = "",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Timer]:
    """List the timers that have not ended, by id."""
    actor.identity.require_list(Scope.ADMIN, chat_key=chat_key)
    after = "" if cursor is None else text_of(cursor)
    async with actor.services.database.read() as transaction:
        rows = await timers_after(transaction, chat_key, beginning=beginning, after=after, limit=limit + 1)
    return page_of(rows, limit=limit, answer=timer_answer, position=id_of)


async def change_timer(actor: Actor, timer_id: str, body: TimerBody) -> Timer:
    """Pause or resume a timer; a one-time timer whose time has passed fires when it is resumed."""
    return await _change(actor, timer_id, TimerChange.PAUSE if body.state == "paused" else TimerChange.RESUME)


async def delete_timer(actor: Actor, timer_id: str) -> Timer:
    """Delete a timer; returns what it was."""
    return await _change(actor, timer_id, TimerChange.DELETE)


async def _change(actor: Actor, timer_id: str, wanted: TimerChange) -> Timer:
    actor.identity.require(Scope.ADMIN)
    async with actor.services.database.begin() as transaction:
        timer = (await timers_of(transaction, [timer_id])).get(timer_id)
        if timer is None or not actor.identity.has_chat(timer.chat_key):
            raise NotFoundError(f"there is no timer {timer_id!r}")
        await actor.record(transaction, f"timer.{wanted.value}", timer_id)
        return timer_answer(await change_stored_timer(transaction, timer, wanted))


def timer_answer(timer: TimerRow) -> Timer:
    """Return a timer of any kind."""
    if isinstance(timer, WorkerTimer):
        return Timer(
            id=timer.id,
            kind="once",
            chat_key=timer.chat_key,
            state="waiting",
            fires_at=timer.fire_at,
            description=timer.description,
            temporary=timer.temporary,
            owner=timer.worker,
            plugin=timer.plugin_key,
        )
    if isinstance(timer, CronJob):
        return Timer(
            id=timer.job_id,
            kind="recurring",
            chat_key=timer.chat_key,
            state="paused" if timer.next_fire_at is None else "waiting",
            fires_at=timer.next_fire_at,
            description=timer.event_desc,
            schedule=timer.cron_expr,
            timezone=timer.timezone,
            workday_mode=timer.workday_mode,
            title=timer.title,
            last_fired_at=timer.last_fired_at,
        )
    return Timer(
        id=timer.id,
        kind="once",
        chat_key=timer.chat_key,
        state=timer.state,
        fires_at=timer.fire_at,
        description=timer.description,
        temporary=timer.temporary,
    )
