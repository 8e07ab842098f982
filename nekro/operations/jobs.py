"""Background jobs, calls that report progress, and detached calls."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Final

from nekro.operations.actor import Actor, RefusedError, Scope
from nekro.operations.pages import Beginning, Cursor, Limit, OfChat, Param, page_of, text_of
from nekro_agent.errors import NotFoundError
from nekro_client.models import Job, JobAttempt, JobLog, JobLogEntry, Page, SignalBody
from storage.repositories.job_log import JobLogEntry as JobLogRow
from storage.repositories.jobs import Job as JobRow
from storage.states import JobLogKind, JobState

__all__ = [
    "attempts_of",
    "cancel_job",
    "get_job",
    "get_job_log",
    "job_answer",
    "list_jobs",
    "retry_job",
    "signal_job",
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
    return Job(
        id=row.id,
        type=row.type,
        plugin=row.plugin_key,
        chat_key=row.chat_key,
        state=_JOB_STATES.get(row.state, row.state.value),
        percent=row.percent,
        message=row.message,
        task_id=row.task_id,
        attempt=row.attempt,
        worker=row.worker,
        data=row.data,
        turn_id=row.turn_id,
        call_id=row.call_id,
        retry_of=row.retry_of,
        can_retry=row.can_retry,
        cancel_requested_at=row.cancel_requested_at,
        created_at=row.created_at,
        started_at=row.started_at,
        updated_at=row.updated_at,
        finished_at=row.finished_at,
    )


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
