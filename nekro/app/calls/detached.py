"""Detached calls: calls that run longer than their callers wait continue as jobs.

The waiting code continues (BEHAVIOR), ends as it would anyway (AGENT types) or gets an error that
says that there is no value yet (TOOL). From then on the row decides: the worker that ends the call
informs the chat in the same transaction, and requests a round if the chat waits for the outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from nekro.app.calls.records import was_decided
from nekro.app.calls.waits import caller_of, job_ended, wake
from nekro.app.chats.events import record_job
from nekro.app.chats.writer import append_message
from nekro.base.metrics import metrics
from nekro.plugins.entries import MethodEntry
from nekro.wire.invocation import Invocation
from nekro_agent.durations import GRACE_SECONDS
from nekro_agent.errors import FencedError, NotApprovedError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import JobState, MessageKind
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.call_progress import CallProgress
from storage.repositories.calls import Call, CallRequest
from storage.repositories.messages import NewMessage
from storage.states import CallState
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "CallDetacher",
    "begin_job",
    "detached_request",
    "end_job",
    "longest_seconds",
    "settle",
]

_TEXT_CHARS: Final = 4000
_ENDS: Final = {
    CallState.DONE: JobState.SUCCEEDED,
    CallState.CANCELLED: JobState.CANCELLED,
}


def longest_seconds(invocation: Invocation) -> float:
    """Return how long the end of a call may take to be recorded; its worker counts as dead after that."""
    return max(invocation.remaining_seconds(), 0) + 3 * GRACE_SECONDS


class CallDetacher:
    """The callers' side; one instance per process."""

    def __init__(self, database: Database, publisher: EventPublisher) -> None:
        self._database = database
        self._publisher = publisher

    async def detach(self, entry: MethodEntry, invocation: Invocation, *, lane: str) -> Call:
        """Record that the caller no longer waits, before or after the call was published; may be repeated.

        Returns the call in its current state; a call that has ended has a result on its way.

        Raises:
            StorageUnavailableError: the database does not answer; the call may be detached.
        """
        request = detached_request(entry.type, invocation, lane=lane)
        seconds = longest_seconds(invocation)
        runs_seconds = None if entry.is_claimed else seconds
        async with self._database.begin() as transaction:
            if invocation.chat_key:
                # Before the call, as the worker that records its end does; otherwise the two could deadlock.
                await transaction.chats.lock(invocation.chat_key, create=True)
            call = await transaction.detached_calls.detach(request, runs_seconds=runs_seconds)
            if call.finished_at is None:
                await begin_job(transaction, self._publisher, call, invocation)
        metrics().calls_detached.labels(entry.task).inc()
        return call

    async def withdraw(self, call_id: str) -> None:
        """Cancel a call that could not be published; a worker that receives it anyway will not run it."""
        async with self._database.begin() as transaction:
            await transaction.calls.cancel(call_id, reason="it could not be sent to a worker")
            reason = "it could not be sent to a worker"
            await end_job(transaction, self._publisher, call_id, JobState.FAILED, reason)


async def begin_job(
    transaction: Transaction, publisher: EventPublisher, call: Call, invocation: Invocation
) -> None:
    """List a call among the jobs, because its caller waits no longer; a listed one is not announced again."""
    plugin_key, _, name = call.method.rpartition(".")
    is_new = await transaction.call_progress.begin(
        CallProgress(
            call_id=call.id,
            method=name,
            plugin_key=plugin_key,
            chat_key=call.chat_key,
            worker=call.worker or "",
            percent=0,
            message="",
            lease_seconds=longest_seconds(invocation),
            round_id=call.round_id,
            turn_id=invocation.turn_id,
        )
    )
    if is_new:
        await record_job(transaction, publisher, EventType.JOB_STARTED, await transaction.jobs.get(call.id))


async def settle(
    transaction: Transaction, publisher: EventPublisher, call: Call, *, value: Any = None
) -> None:
    """Report the end of a detached call to its chat, in the transaction that ends it; ignore other calls.

    A program that waited for a decision on the call, or for it as a job, goes on and reads its end itself.
    Else the results of BEHAVIOR and AGENT types are reported by their claim, and a BEHAVIOR call that a
    person approved wakes
    the model too, because its program ended at the call.
    """
    if call.detached_at is None:
        return
    text = _end_text(call, value)
    state = _ENDS.get(call.state, JobState.FAILED)
    is_awaited = await end_job(transaction, publisher, call.id, state, text or "done")
    parked = await transaction.parked_programs.waiting_for(call.id) if was_decided(call) else None
    if parked is not None:
        await wake(transaction, publisher, call, None, program_id=parked.program_id)
        return
    if is_awaited:
        return
    if text is None:
        caller = caller_of(call)
        if call.type is SandboxMethodType.BEHAVIOR and caller is not None and caller.approval_id is not None:
            await wake(transaction, publisher, call, (call.outcome or {}).get("text") or "done")
        return
    plugin_key, _, name = call.method.rpartition(".")
    message = NewMessage(
        chat_key=call.chat_key,
        kind=MessageKind.SYSTEM,
        text=text,
        call_id=call.id,
        round_id=call.round_id,
        plugin_key=plugin_key,
        data={"method": name},
        once_key=f"observation:{call.id}",
    )
    row = await append_message(transaction, publisher, message)
    await wake(transaction, publisher, call, text, message=row)


def detached_request(kind: SandboxMethodType, invocation: Invocation, *, lane: str) -> CallRequest:
    """Return the row of a call whose caller waits no longer."""
    return CallRequest(
        id=invocation.call_id,
        method=invocation.method,
        type=kind,
        chat_key=invocation.chat_key,
        round_id=invocation.round_id,
        lane=lane,
        deadline=invocation.deadline,
        repeatable=invocation.repeatable,
        # Only what identifies the recipient; arguments must not appear in the chat.
        invocation={"invocation": invocation.model_dump(mode="json", exclude={"args"})},
    )


async def end_job(
    transaction: Transaction, publisher: EventPublisher, call_id: str, state: JobState, message: str
) -> bool:
    """End the row that lists a call among the jobs; no effect if there is none or it has ended.

    Returns whether a program waited for it.
    """
    try:
        ended = await transaction.jobs.finish(call_id, fence=CallProgress.fence, state=state, message=message)
    except FencedError:
        return False
    return await job_ended(transaction, publisher, ended)


def _end_text(call: Call, value: Any) -> str | None:
    """The text for the chat; None when the claim reports the result."""
    name = call.method.rpartition(".")[2]
    if call.started_at is None and call.error_type == NotApprovedError.__name__:
        return f"{name} did not run: {call.error_message}"
    if call.state is not CallState.DONE:
        return f"{name} (job {call.id}) failed: {call.error_type}: {call.error_message}"
    if call.type is not SandboxMethodType.TOOL:
        return None
    shown = value if isinstance(value, str) else repr(value)
    cut = shown if len(shown) <= _TEXT_CHARS else f"{shown[:_TEXT_CHARS]}… ({len(shown)} characters)"
    return f"{name} (job {call.id}) returned: {cut}"
