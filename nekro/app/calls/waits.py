"""Waits of programs for the end of a job, a time, or the answer of a person: rows, and no process.

A wait begins as a call in state AWAITING with the row of its program, as a request for approval does. What
ends it ends the call and requests the round that goes on with the program, in the transaction that records
the cause: the end of the job, the message of the person, or the sweep that finds its time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from nekro.app.calls.records import end_of_row
from nekro.app.calls.wait_arguments import AskedWait, asked_wait, chosen, question_text
from nekro.app.chats.events import record_caused, record_job
from nekro.app.chats.writer import append_message, request_round
from nekro.app.retried_writes import write_with_retries
from nekro.wire.invocation import Envelope, Invocation
from nekro.wire.values import encode_value
from nekro_agent.errors import (
    ArgumentError,
    CallCancelledError,
    CallTimeoutError,
    WaitRefusedError,
)
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import JobState, MessageKind
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.calls import Call, CallRequest
from storage.repositories.events import NewEvent
from storage.repositories.jobs import Job
from storage.repositories.messages import Message, NewMessage
from storage.repositories.parked_programs import Wait
from storage.repositories.rounds import Round, RoundRequest
from storage.states import CallState, TriggerKind, WaitKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["ProgramWaits", "answer_question", "caller_of", "cancel_waits", "job_ended", "wait_json", "wake"]

#: Up to so long a program waits for a time in its sandbox: to end it and run it again takes longer.
IN_PLACE_SECONDS: Final = 10.0
#: Waits of one chat at a time, and of one program: each runs the program again from its first line.
MOST_OPEN: Final = 20
MOST_OF_PROGRAM: Final = 100
_MOST_VALUE_BYTES: Final = 8 << 20


@dataclass(frozen=True, kw_only=True)
class _WaitEnd:
    """How a wait ended: with a value, or with an error."""

    #: As tagged text.
    value: bytes = b""
    error_type: str | None = None
    error_message: str | None = None

    @classmethod
    def of(cls, value: object) -> _WaitEnd:
        """Return the end with a value."""
        return cls(value=encode_value(value, max_bytes=_MOST_VALUE_BYTES))


class ProgramWaits:
    """Begins the waits of programs; one instance per process."""

    def __init__(self, database: Database, publisher: EventPublisher, *, most_seconds: float) -> None:
        """Create it.

        Args:
            most_seconds: how long after its first line a program may still wait.
        """
        self._database = database
        self._publisher = publisher
        self._most_seconds = most_seconds

    async def begin(
        self, name: str, invocation: Invocation, *, lane: str, program_id: str, note: str
    ) -> Call | None:
        """Begin a wait, unless it began before; returns its call if that has ended, None if it goes on.

        A short wait for a time ends here. So does one that is refused, because it is too long, or one of too
        many.

        Args:
            name: of the built-in method.
            note: what the program read before it.

        Raises:
            ArgumentError: the arguments do not fit, or the chat has no such job.
            CallCancelledError: its round was stopped.
            StorageUnavailableError, OutcomeUnknownError: as ``ApprovalRequests.admit`` raises them.
        """
        asked = asked_wait(name, invocation.args)
        is_short = False
        if asked.at is not None:
            rest = (asked.at - shared_time()).total_seconds()
            is_short = rest <= IN_PLACE_SECONDS
            if is_short:
                await asyncio.sleep(max(rest, 0))
        request = CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=SandboxMethodType.TOOL,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=lane,
            invocation={"invocation": invocation.model_dump(mode="json")},
            readings=note or None,
        )

        async def write(transaction: Transaction) -> Call | None:
            await transaction.chats.lock(request.chat_key, create=True)
            # A request to stop takes the lock too: it either finds this wait, or came before it.
            if (await transaction.rounds.standing(request.round_id)).is_asked_to_stop:
                raise CallCancelledError(f"call {request.id}: its round was stopped on request")
            known = await transaction.calls.find(request.id)
            if known is not None:
                return None if known.state is CallState.AWAITING else known
            end = _WaitEnd.of(None) if is_short else await self._early_end(transaction, request, asked)
            if end is None:
                try:
                    await self._begin(transaction, name, request, asked, invocation, program_id)
                    return None
                except (
                    WaitRefusedError
                ) as exc:  # recorded, so that the program reads it again if it is run again
                    end = _WaitEnd(error_type=type(exc).__name__, error_message=str(exc))
            await transaction.awaiting_calls.add(request)
            return await _complete(transaction, request.id, end)

        unknown = f"call {request.id} of {request.method} may or may not wait"
        return await write_with_retries(self._database.begin, write, unknown=unknown)

    async def _early_end(
        self, transaction: Transaction, request: CallRequest, asked: AskedWait
    ) -> _WaitEnd | None:
        """Return the end of a wait for a job that has ended; None: there is something to wait for."""
        if asked.kind is not WaitKind.JOB:
            return None
        job = await transaction.jobs.find(asked.subject or "")
        if job is None or job.chat_key != request.chat_key:
            raise ArgumentError(f"wait_for_job: this chat has no job {asked.subject!r:.80}")
        return await _end_of_job(transaction, job) if job.state.is_final else None

    async def _begin(
        self,
        transaction: Transaction,
        name: str,
        request: CallRequest,
        asked: AskedWait,
        invocation: Invocation,
        program_id: str,
    ) -> None:
        wait = Wait(
            call_id=request.id,
            program_id=program_id,
            chat_key=request.chat_key,
            turn_id=invocation.turn_id,
            kind=asked.kind,
            subject=invocation.user_id if asked.kind is WaitKind.ANSWER else asked.subject,
            about=asked.about,
            until=await self._until(transaction, name, asked, program_id),
        )
        of_chat, of_program = await transaction.parked_programs.count(
            chat_key=request.chat_key, program_id=program_id
        )
        if of_chat >= MOST_OPEN:
            raise WaitRefusedError(
                f"{name}: {of_chat} programs of this chat wait already, the most it may have"
            )
        if of_program >= MOST_OF_PROGRAM:
            raise WaitRefusedError(f"{name}: this program has waited {of_program} times, the most it may")
        await transaction.awaiting_calls.add(request)
        await transaction.parked_programs.begin(wait)
        if wait.about is not None:
            message = NewMessage(
                chat_key=wait.chat_key,
                kind=MessageKind.ASSISTANT,
                text=question_text(wait.about),
                call_id=request.id,
                round_id=request.round_id,
                turn_id=wait.turn_id,
                data={**wait.about, "answers": "next_message"},
                once_key=f"question:{request.id}",
            )
            await append_message(transaction, self._publisher, message)
        event = _event(EventType.WAIT_STARTED, wait, {"round_id": request.round_id})
        await record_caused(transaction, self._publisher, wait.chat_key, event)

    async def _until(
        self, transaction: Transaction, name: str, asked: AskedWait, program_id: str
    ) -> datetime:
        now = shared_time()
        began = (await transaction.rounds.get(program_id)).requested_at
        last = began + timedelta(seconds=self._most_seconds)
        if last <= now or (asked.at is not None and asked.at > last):
            raise WaitRefusedError(
                f"{name}: this program may wait until {last.isoformat(timespec='seconds')} at most; set a "
                "timer for what is later"
            )
        if asked.at is not None:
            return asked.at
        return last if asked.seconds is None else min(last, now + timedelta(seconds=asked.seconds))

    async def end_due(self, *, limit: int) -> int:
        """End the waits whose time has come, each in its own transaction; returns how many."""
        async with self._database.read() as transaction:
            waits = await transaction.parked_programs.due(limit=limit)
        for wait in waits:
            async with self._database.begin() as transaction:
                await transaction.chats.lock(wait.chat_key, create=True)
                await _end_wait(transaction, self._publisher, wait, _end_of_time(wait))
        return len(waits)


async def may_park(transaction: Transaction, chat_key: str, program_id: str) -> bool:
    """Whether a program may wait for approval: what it needs then is stored until a person decides."""
    of_chat, of_program = await transaction.parked_programs.count(chat_key=chat_key, program_id=program_id)
    return of_chat < MOST_OPEN and of_program < MOST_OF_PROGRAM


def _end_of_time(wait: Wait) -> _WaitEnd:
    if wait.kind is WaitKind.TIME:
        return _WaitEnd.of(None)
    what = f"job {wait.subject} has not ended" if wait.kind is WaitKind.JOB else "no answer has arrived"
    return _WaitEnd(error_type=CallTimeoutError.__name__, error_message=f"{what} in time")


async def _end_wait(
    transaction: Transaction,
    publisher: EventPublisher,
    wait: Wait,
    end: _WaitEnd,
    *,
    message: Message | None = None,
) -> str | None:
    """End an open wait, and request the round that goes on with its program; ignore one that has ended.

    Args:
        message: the answer that ends it.

    Returns:
        The turn of the round.
    """
    ended = await _complete(transaction, wait.call_id, end)
    if ended is None:
        return None
    data = {"state": ended.state.value, "error": end.error_message}
    event = _event(EventType.WAIT_ENDED, wait, {"round_id": ended.round_id, **data})
    await record_caused(transaction, publisher, wait.chat_key, event)
    requested = await wake(
        transaction, publisher, ended, None, message=message, program_id=wait.program_id, asks=False
    )
    return None if requested is None else requested.turn_id


async def answer_question(
    transaction: Transaction, publisher: EventPublisher, wait: Wait, message: Message
) -> str | None:
    """End the wait for an answer with a message; returns the turn in which its program goes on."""
    value = chosen(message.text, (wait.about or {}).get("choices", ()))
    return await _end_wait(transaction, publisher, wait, _WaitEnd.of(value), message=message)


async def cancel_waits(
    transaction: Transaction,
    publisher: EventPublisher,
    chat_key: str,
    *,
    reason: str,
    turn_id: str | None = None,
    round_id: str | None = None,
) -> list[str]:
    """End the open waits of a chat whose lock the caller holds; their programs do not go on.

    Returns the calls in which they waited.

    Args:
        turn_id, round_id: only those of one turn or round; None does not limit.
    """
    waits = await transaction.parked_programs.open_of_chat(chat_key, turn_id=turn_id, round_id=round_id)
    await transaction.awaiting_calls.cancel([wait.call_id for wait in waits], reason=reason)
    for wait in waits:
        event = _event(EventType.WAIT_ENDED, wait, {"state": CallState.CANCELLED.value, "error": reason})
        await record_caused(transaction, publisher, chat_key, event)
    return [wait.call_id for wait in waits]


async def job_ended(transaction: Transaction, publisher: EventPublisher, job: Job) -> bool:
    """Record the event of a job that has ended, and end the waits for it; returns whether there were any."""
    await record_job(transaction, publisher, EventType.JOB_ENDED, job)
    if not job.chat_key:
        return False
    waits = await transaction.parked_programs.open_for_job(job.chat_key, job.id)
    for wait in waits:
        await _end_wait(transaction, publisher, wait, await _end_of_job(transaction, job))
    return bool(waits)


async def _end_of_job(transaction: Transaction, job: Job) -> _WaitEnd:
    call = await transaction.calls.find(job.id) if job.is_call else None
    end = None if call is None else end_of_row(call)
    if isinstance(end, dict):
        envelope = Envelope.model_validate(end)
        return (
            _WaitEnd.of(envelope.text)
            if envelope.type.wakes_agent
            else _WaitEnd(value=envelope.value_bytes())
        )
    if job.state is JobState.SUCCEEDED:
        return _WaitEnd.of(job.message if job.data is None else job.data)
    if call is not None and call.error_type is not None:
        return _WaitEnd(error_type=call.error_type, error_message=call.error_message)
    kind = "JobCancelledError" if job.state is JobState.CANCELLED else "JobFailedError"
    return _WaitEnd(error_type=kind, error_message=f"job {job.id} of {job.type}: {job.message}")


async def _complete(transaction: Transaction, call_id: str, end: _WaitEnd) -> Call | None:
    now = shared_time()
    outcome = Envelope.of(
        value=end.value, call_id=call_id, type=SandboxMethodType.TOOL, started_at=now, finished_at=now
    )
    return await transaction.awaiting_calls.complete(
        call_id,
        outcome=outcome.model_dump(mode="json") if end.error_type is None else None,
        error_type=end.error_type,
        error_message=end.error_message,
    )


def _event(kind: EventType, wait: Wait, more: dict[str, Any]) -> NewEvent:
    data = wait_json(wait) | {name: value for name, value in more.items() if name != "round_id"}
    return NewEvent(
        type=kind, turn_id=wait.turn_id, round_id=more.get("round_id"), call_id=wait.call_id, data=data
    )


def wait_json(wait: Wait) -> dict[str, Any]:
    """Describe a wait as JSON data, as events and ``nekro_client.models.Wait`` have it."""
    return {
        "call_id": wait.call_id,
        "kind": wait.kind.value,
        "until": None if wait.until is None else wait.until.isoformat(),
        "job_id": wait.subject if wait.kind is WaitKind.JOB else None,
        "user_id": wait.subject if wait.kind is WaitKind.ANSWER else None,
        **{"question": None, "choices": [], **(wait.about or {})},
    }


async def wake(
    transaction: Transaction,
    publisher: EventPublisher,
    call: Call,
    text: str | None,
    *,
    message: Message | None = None,
    program_id: str | None = None,
    asks: bool = True,
) -> Round | None:
    """Request the round that follows from the end of a call that nothing waits for in memory; returns it.

    Args:
        text: for the model; None: it reads nothing of the call.
        message: what the round is for.
        program_id: the program that goes on; None: the model is asked.
        asks: whether the round counts among those that ask the model.
    """
    found = caller_of(call)
    if found is None or not found.wakes_agent:
        return None
    request = RoundRequest(
        chat_key=call.chat_key,
        trigger_kind=TriggerKind.CALL,
        trigger_id=call.id,
        # A new turn, because the time of the old one is over. The number continues, so that
        # the limit on chains of calls and rounds still applies.
        number=found.round_number + asks,
        cause_turn_id=found.turn_id or found.account_id,
        user_id=found.user_id,
        observation=text,
        program_id=program_id,
    )
    return await request_round(transaction, publisher, request, message=message)


def caller_of(call: Call) -> Invocation | None:
    """Return the recorded invocation of a call, without its arguments; None if it has none."""
    payload = (call.invocation or {}).get("invocation")
    return None if payload is None else Invocation.model_validate({**payload, "args": ""})
