"""Background jobs outside of the code that runs them: rows, attempts, cancellation, retry, signals, notices.

A background job that is cancelled is asked to end; a detached call is stopped. A job that waits for a signal
notices it within a second."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from loguru import logger
from pydantic_core import PydanticSerializationError, to_jsonable_python

from nekro.app.calls.detached import end_job, settle
from nekro.app.calls.waits import job_ended
from nekro.app.chats.events import record_job
from nekro.app.chats.writer import append_message, request_round
from nekro.wire.values import decode_arguments, encode_value, pickled_for
from nekro_agent.errors import ArgumentError, ConflictError, ResultError
from nekro_agent.ports import JobInfo, MessageKind
from nekro_client.event_types import EventType
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.engine import Database
from storage.repositories.jobs import Job, NewJob
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.states import JobState, StoredKind, TriggerKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "MAX_ARGUMENT_BYTES",
    "cancel_job",
    "info_of",
    "notify_chat_of_failure",
    "pack",
    "plain_data",
    "retry_job",
    "signal_job",
    "unpack",
]


#: Size limit of the arguments of a job or signal; larger data belong in files.
MAX_ARGUMENT_BYTES: Final = 8 << 20
#: Size limit of the data of a job's report.
MAX_DATA_CHARS: Final = 1 << 20

_FIELD: Final = "arguments"


def pack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Encode arguments as a JSON value for a row; models, dataclasses and enums become plain data.

    Raises:
        ArgumentError: a value is not plain data, or the arguments together are too large.
    """
    try:
        encoded = encode_value([list(args), dict(kwargs)], max_bytes=MAX_ARGUMENT_BYTES)
    except ResultError as exc:
        raise ArgumentError(f"an argument cannot be passed to a background job: {exc}") from exc
    reason = pickled_for(encoded.decode())
    if reason is not None:
        raise ArgumentError(f"an argument cannot be passed to a background job: {reason}")
    packed = {_FIELD: encoded.decode()}
    unpack(packed)  # fail here, where the caller sees it; the job's worker could not report it
    return packed


def unpack(packed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode the result of ``pack``.

    Raises:
        ArgumentError: it cannot be decoded.
    """
    args, kwargs = decode_arguments(packed[_FIELD], max_bytes=MAX_ARGUMENT_BYTES)
    return args, kwargs


def plain_data(value: Any) -> Any:
    """Convert a job's report to JSON values; a value that has no JSON form becomes its text."""
    if value is None:
        return None
    try:
        plain = to_jsonable_python(value, fallback=str, bytes_mode="base64", inf_nan_mode="constants")
        size = len(json.dumps(plain))
    except (PydanticSerializationError, ValueError, TypeError, RecursionError):
        return str(value)[:MAX_DATA_CHARS]
    if size > MAX_DATA_CHARS:
        logger.bind(chars=size, limit=MAX_DATA_CHARS).warning("job_data_dropped")
        return None
    return plain


def info_of(job: Job) -> JobInfo:
    """Return a job in the form that the SDK uses."""
    return JobInfo(
        id=job.id,
        plugin_key=job.plugin_key,
        task_type=job.type,
        task_id=job.task_id,
        chat_key=job.chat_key,
        state=job.state,
        percent=job.percent,
        message=job.message,
        data=job.data,
        cancel_requested=job.cancel_requested_at is not None,
    )


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
        if not job.is_call:
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
        await job_ended(transaction, publisher, job)
    return job


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
        if not old.can_retry:
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
        transaction.after_commit(partial(publisher.job_queued, job.id, job.chat_key))
    return job


def _refusal(job: Job) -> str:
    if job.is_call:
        return f"job {job.id} is a call, whose arguments are not kept; call the method again"
    if job.state is JobState.SUCCEEDED:
        return f"job {job.id} succeeded; only a job that failed or was cancelled can be started again"
    return f"job {job.id} is {job.state.value}; it can be started again when it has failed or is cancelled"


async def signal_job(database: Database, job_id: str, key: str, data: Any) -> bool:
    """Pass data to a job's ``wait(key)``; stored if there is no wait yet. False when the job has ended.

    Raises:
        ArgumentError: the data are not plain data, or too large.
        NotFoundError: there is no such job.
    """
    packed = pack((data,), {})
    async with database.begin() as transaction:
        job = await transaction.jobs.get(job_id)
        if job.state.is_final:
            return False
        await transaction.job_signals.signal(job_id, key=key, data=packed)
    return True


async def notify_chat_of_failure(transaction: Transaction, publisher: EventPublisher, job: Job) -> None:
    """Record both once per job, in the transaction that ends the job; nothing for a job without a chat."""
    if not job.chat_key:
        return
    message = NewMessage(
        chat_key=job.chat_key,
        kind=MessageKind.SYSTEM,
        text=f"Background task {job.type} {job.task_id!r} failed: {job.message}",
        plugin_key=job.plugin_key,
        once_key=f"job:{job.id}",
    )
    row = await append_message(transaction, publisher, message)
    request = RoundRequest(
        chat_key=job.chat_key,
        trigger_kind=TriggerKind.JOB,
        trigger_id=job.id,
        cause_turn_id=job.turn_id,
        account_id=job.id,
    )
    await request_round(transaction, publisher, request, message=row)
