"""Starts a background job again as a new one, with the same arguments."""

from __future__ import annotations

import json
from functools import partial

from nekro.app.chats.events import record_job
from nekro.app.chats.publisher import EventPublisher
from nekro.app.jobs.data import is_call
from nekro_agent.errors import ConflictError
from storage.access.stored_bytes import ROW_BYTES, size_of
from storage.engine import Database
from storage.repositories.jobs import Job, NewJob
from storage.states import EventType, JobState, StoredKind

__all__ = ["can_retry", "retry_job"]


def can_retry(job: Job) -> bool:
    """Whether a job may be started again: it failed or was cancelled, and its arguments are stored."""
    return job.state in (JobState.FAILED, JobState.CANCELLED) and not is_call(job)


async def retry_job(
    database: Database, publisher: EventPublisher, job_id: str, *, new_id: str, account_id: str | None = None
) -> Job:
    """Start a job again and return the new one; a repetition with the same ``new_id`` returns that one.

    The new job has the type, name, chat, turn and crash policy of the old one, which stays as it is. The
    plugin's callback for the end of the old job, if there is one, is not called for the new one.

    Args:
        account_id: who pays for the new job; None: who paid for the old one.

    Raises:
        NotFoundError: there is no such job.
        ConflictError: it cannot be started again, or a job of its name is open.
    """
    async with database.begin() as transaction:
        old = await transaction.jobs.get(job_id)
        known = await transaction.jobs.find(new_id)
        if known is not None:
            return known
        if not can_retry(old):
            raise ConflictError(_refusal(old))
        new = NewJob(
            id=new_id,
            type=old.type,
            task_id=old.task_id,
            plugin_key=old.plugin_key,
            chat_key=old.chat_key,
            args=old.args,
            on_crash=old.on_crash,
            call_id=old.call_id,
            round_id=old.round_id,
            turn_id=old.turn_id,
            retry_of=old.id,
        )
        job = await transaction.jobs.add(new)
        payer = account_id or old.id
        await transaction.keys.pass_on(payer, job.id)
        transaction.stored_bytes.add(payer, StoredKind.ROUNDS, ROW_BYTES + size_of(json.dumps(job.args)))
        await record_job(transaction, publisher, EventType.JOB_STARTED, job)
        transaction.after_commit(partial(publisher.job_queued, job.id))
    return job


def _refusal(job: Job) -> str:
    if is_call(job):
        return f"job {job.id} is a call, whose arguments are not kept; call the method again"
    if job.state is JobState.SUCCEEDED:
        return f"job {job.id} succeeded; only a job that failed or was cancelled can be started again"
    return f"job {job.id} is {job.state.value}; it can be started again when it has failed or is cancelled"
