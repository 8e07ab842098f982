"""Cancels a job from outside: a background job is asked to end, a detached call is stopped."""

from __future__ import annotations

from nekro.app.calls.detached import end_job, settle
from nekro.app.chats.events import record_job
from nekro.app.chats.publisher import EventPublisher
from nekro.app.jobs.data import is_call
from storage.engine import Database
from storage.repositories.jobs import Job
from storage.states import EventType, JobState
from storage.transaction import Transaction

__all__ = ["cancel_job"]


async def cancel_job(
    database: Database, publisher: EventPublisher, job_id: str, *, reason: str = "cancelled by an operator"
) -> Job:
    """Cancel a job and return it in its new state; a job that has ended is returned unchanged.

    A running background job notices within a second and may take time to clean up.

    Raises:
        NotFoundError: there is no such job.
    """
    async with database.begin() as transaction:
        job = await transaction.jobs.get(job_id)
        if job.state.is_final:
            return job
        if not is_call(job):
            return await _ask(transaction, publisher, job_id, reason)
        call = await transaction.calls.cancel(job_id, reason=reason)
        if call is not None:
            await settle(transaction, publisher, call)
        await end_job(transaction, publisher, job_id, JobState.CANCELLED, reason)
        job = await transaction.jobs.get(job_id)
    await publisher.revoke(job_id)
    return job


async def _ask(transaction: Transaction, publisher: EventPublisher, job_id: str, reason: str) -> Job:
    job = await transaction.jobs.request_cancel(job_id, reason=reason)
    if job.state.is_final:
        await transaction.job_signals.clear(job_id)
        await record_job(transaction, publisher, EventType.JOB_ENDED, job)
    return job
