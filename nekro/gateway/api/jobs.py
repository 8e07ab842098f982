"""Background jobs and timers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from nekro.app.jobs import cancel_job as cancel_stored_job
from nekro.app.jobs import retry_job as retry_stored_job
from nekro.app.jobs import signal_job as signal_stored_job
from nekro.app.services import Services
from nekro.app.timers import Timer as TimerRow
from nekro.app.timers import TimerChange, id_of, timers_after, timers_of
from nekro.app.timers import change_timer as change_stored_timer
from nekro.gateway.access.admission import require_budget
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.identity import Identity, Scope, record_act
from nekro.gateway.problems import ProblemError
from nekro.gateway.views import job_answer, job_log_answer, timer_answer
from nekro.gateway.web.bodies import KeyedRoute
from nekro.gateway.web.paging import Cursor, Limit, cursor_of, text_of
from nekro_agent.errors import NotFoundError
from nekro_client.models import Job, JobLog, Page, SignalBody, Timer, TimerBody
from storage.repositories.jobs import Job as JobRow
from storage.transaction import Transaction

__all__ = ["router"]

router = APIRouter(route_class=KeyedRoute, tags=["work"])
OfChat = Annotated[str | None, Query(max_length=1250, description="only of this chat")]


@router.get("/jobs")
async def list_jobs(
    services: ServicesDep,
    identity: IdentityDep,
    chat_key: OfChat = None,
    open_only: Annotated[bool, Query(alias="open", description="only jobs that have not ended")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Job]:
    """List background jobs, calls that report progress, and detached calls, the newest first.

    A key without the scope `admin` sees those of its chats; a page of it may be shorter than `limit` although
    another one follows.
    """
    sees_all = Scope.ADMIN in identity.scopes
    if sees_all:
        identity.require_list(Scope.ADMIN, chat_key=chat_key)
    else:
        identity.require(Scope.READ, chat_key=chat_key)
    after = None if cursor is None else text_of(cursor)
    async with services.database.read() as transaction:
        rows = await transaction.jobs.newest(limit=limit, chat_key=chat_key, open_only=open_only, after=after)
    more = cursor_of(rows[-1].id) if len(rows) == limit else None
    seen = (row for row in rows if sees_all or _has(identity, row))
    return Page(items=[job_answer(row) for row in seen], next_cursor=more)


@router.get("/jobs/{job_id}")
async def get_job(job_id: PathText, services: ServicesDep, identity: IdentityDep) -> Job:
    """Show a job."""
    scope = Scope.ADMIN if Scope.ADMIN in identity.scopes else Scope.READ
    return job_answer(await _job(services, identity, job_id, scope=scope))


@router.get("/jobs/{job_id}/log")
async def get_job_log(job_id: PathText, services: ServicesDep, identity: IdentityDep) -> JobLog:
    """Show the attempts at a job, its reports, and what its code logged.

    Secrets of the settings are replaced. A call that is shown as a job has no log.
    """
    scope = Scope.ADMIN if Scope.ADMIN in identity.scopes else Scope.READ
    row = await _job(services, identity, job_id, scope=scope)
    async with services.database.read() as transaction:
        return job_log_answer(await transaction.job_log.of_job(row.id))


@router.post("/jobs/{job_id}/retry", status_code=HTTPStatus.CREATED, response_model=Job)
async def retry_job(
    job_id: PathText, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Start a job that failed or was cancelled again, as a new job with the same arguments.

    The new job names the old one in `retry_of`, belongs to the same chat and turn, and the key that asks pays
    for it. 409: the job is open or succeeded, is a call, whose arguments are not kept, or a job of the same
    plugin, type and name is open.
    """
    row = await _job(services, identity, job_id)
    new_id = once.id

    async def work() -> Job:
        await require_budget(services, identity)
        job = await retry_stored_job(
            services.database, services.publisher, row.id, new_id=new_id, account_id=identity.account_id
        )
        async with services.database.begin() as transaction:
            await record_act(transaction.audit, request, identity, "job.retry", row.id, {"job": job.id})
        return job_answer(job)

    return await once.run(work, status=HTTPStatus.CREATED)


@router.post("/jobs/{job_id}/cancel", response_model=Job)
async def cancel_job(
    job_id: PathText, request: Request, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Ask a job to end, or stop a detached call; a job that has ended is returned unchanged."""
    row = await _job(services, identity, job_id)

    async def work() -> Job:
        async with services.database.begin() as transaction:
            await record_act(transaction.audit, request, identity, "job.cancel", row.id)
        return job_answer(await cancel_stored_job(services.database, services.publisher, row.id))

    return await once.run(work)


@router.post("/jobs/{job_id}/signals", status_code=HTTPStatus.ACCEPTED, response_model=Job)
async def signal_job(
    job_id: PathText,
    body: SignalBody,
    request: Request,
    services: ServicesDep,
    identity: IdentityDep,
    once: OnceDep,
) -> Response:
    """Pass data to a job's ``wait(key)``; it is kept if the job does not wait yet."""
    row = await _job(services, identity, job_id)

    async def work() -> Job:
        async with services.database.begin() as transaction:
            await record_act(transaction.audit, request, identity, "job.signal", row.id, {"key": body.key})
        if not await signal_stored_job(services.database, row.id, body.key, body.data):
            raise ProblemError(HTTPStatus.CONFLICT, "job_ended", f"job {row.id} has ended")
        return job_answer(row)

    # A job that has taken the signal would take a second one for another.
    return await once.run(work, status=HTTPStatus.ACCEPTED, is_repeatable=False)


@router.get("/timers")
async def list_timers(
    services: ServicesDep,
    identity: IdentityDep,
    chat_key: OfChat = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Timer]:
    """List the timers that have not ended, by id."""
    identity.require_list(Scope.ADMIN, chat_key=chat_key)
    after = "" if cursor is None else text_of(cursor)
    async with services.database.read() as transaction:
        rows = await timers_after(transaction, chat_key, after=after, limit=limit + 1)
    more = cursor_of(id_of(rows[limit - 1])) if len(rows) > limit else None
    return Page(items=[timer_answer(timer) for timer in rows[:limit]], next_cursor=more)


@router.patch("/timers/{timer_id}")
async def change_timer(
    timer_id: PathText, body: TimerBody, request: Request, services: ServicesDep, identity: IdentityDep
) -> Timer:
    """Pause or resume a timer; a one-time timer whose time has passed fires when it is resumed."""
    wanted = TimerChange.PAUSE if body.state == "paused" else TimerChange.RESUME
    return await _change(timer_id, wanted, request, services, identity)


@router.delete("/timers/{timer_id}")
async def delete_timer(
    timer_id: PathText, request: Request, services: ServicesDep, identity: IdentityDep
) -> Timer:
    """Delete a timer; returns what it was."""
    return await _change(timer_id, TimerChange.DELETE, request, services, identity)


async def _change(
    timer_id: str, wanted: TimerChange, request: Request, services: Services, identity: Identity
) -> Timer:
    identity.require(Scope.ADMIN)
    async with services.database.begin() as transaction:
        timer = await _timer(transaction, identity, timer_id)
        await record_act(transaction.audit, request, identity, f"timer.{wanted.value}", timer_id)
        return timer_answer(await change_stored_timer(transaction, timer, wanted))


async def _timer(transaction: Transaction, identity: Identity, timer_id: str) -> TimerRow:
    timer = (await timers_of(transaction, [timer_id])).get(timer_id)
    if timer is not None and identity.has_chat(timer.chat_key):
        return timer
    raise NotFoundError(f"there is no timer {timer_id!r}")


def _has(identity: Identity, row: JobRow) -> bool:
    """Whether a job is of a chat that the key has."""
    return bool(row.chat_key) and identity.has_chat(row.chat_key)


async def _job(services: Services, identity: Identity, job_id: str, *, scope: Scope = Scope.ADMIN) -> JobRow:
    identity.require(scope)
    async with services.database.read() as transaction:
        row = await transaction.jobs.find(job_id)
    if row is None or not identity.has_chat(row.chat_key):
        raise NotFoundError(f"there is no job {job_id!r}")
    return row
