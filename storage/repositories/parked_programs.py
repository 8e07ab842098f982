"""Programs that wait for something in a call: what they need to be run again, however long that takes.

A program that waits holds no process. Its call is in state AWAITING, and its row of the wait says what it
waits for: the decision of a person, the end of a job, a time, or the answer of a person. Its recorded calls
have their rows. The results of other calls lie in Redis, which may be emptied meanwhile, so the row of the
wait has those that no earlier row of the program has. What ends the wait ends the call and requests the round
that runs the program again, in one transaction. Rows are deleted with the round that began the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Executable,
    Select,
    bindparam,
    delete,
    func,
    or_,
    select,
    union,
    update,
)

from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, columns_of, is_one_of, values_of
from storage.repositories.calls import Call, CallRequest
from storage.repositories.round_values import Round, values_of_merged
from storage.sql import insert, now
from storage.states import CallState, RoundState, WaitKind
from storage.tables import CALLS, CHATS, PARKED_PROGRAMS, ROUNDS

__all__ = [
    "AwaitingCallRepository",
    "CopiedProgram",
    "ParkedProgram",
    "ParkedProgramRepository",
    "ProgramOrigin",
    "Wait",
]

#: Most parameters of one statement.
_BATCH: Final = 500


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a program waits for in one of its calls."""

    #: The call that it waits in.
    call_id: str
    #: The round whose answer the program is.
    program_id: str
    chat_key: str
    #: The turn of the call.
    turn_id: str | None
    kind: WaitKind
    #: The id of the job, or the person who may answer; None: everyone of the chat.
    subject: str | None = None
    #: ``question`` and ``choices``.
    about: dict[str, Any] | None = None
    #: When it ends, at the latest; None: it has ended.
    until: datetime | None


@dataclass(frozen=True, kw_only=True)
class ParkedProgram:
    """What a program needs to be run again after a wait."""

    call_id: str
    #: Results of calls without rows, as workers stored them, by call id: those since the wait before.
    answers: dict[str, Any] = field(default_factory=dict, repr=False)
    #: What was read before its calls without rows, as notes by call id (``nekro.broker.program_calls``).
    notes: dict[str, str] = field(default_factory=dict, repr=False)
    #: The variables with which it began, as in ``TurnVariables``; None: without any.
    kept: dict[str, str] | None = field(default=None, repr=False)
    not_kept: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class ProgramOrigin:
    """The program of another chat that a program goes on with."""

    #: It, and those that it went on with itself: the first one first.
    origins: list[str]
    #: The chat of the first one.
    chat_key: str
    #: The methods of those of its calls that have effects, by the ids that they have in the new program.
    effects: dict[str, str]
    #: The stop type that ended it; None: its end is not recorded, and the new program goes on there.
    stop_type: int | None = None


@dataclass(frozen=True, kw_only=True)
class CopiedProgram:
    """A program that begins with the recorded answers of one of another chat."""

    #: The requested round that runs it.
    round_id: str
    chat_key: str
    origin: ProgramOrigin
    #: As in ``ParkedProgram``; all calls are in ``answers``.
    answers: dict[str, Any] = field(repr=False)
    notes: dict[str, str] = field(repr=False)
    #: The answer of the model, the code, and the model.
    answer: str | None
    code: str
    model: str | None


class ParkedProgramRepository(Repository):
    """Rows of waits. A wait is open until its ``until`` is set to NULL, by ``AwaitingCallRepository``."""

    async def begin(self, wait: Wait) -> None:
        """Record that a program will wait in a call, before that can end; ``park`` completes the row."""
        empty = ParkedProgram(call_id=wait.call_id)
        new = insert(self._dialect, PARKED_PROGRAMS).values(
            {**vars(empty), **values_of(wait, Wait), "parked_at": now()}
        )
        await self._rows(new.on_conflict_do_nothing(index_elements=[PARKED_PROGRAMS.c.call_id]))

    async def park(self, parked: ParkedProgram) -> None:
        """Record what a program needs that has ended at its wait."""
        statement = update(PARKED_PROGRAMS).where(PARKED_PROGRAMS.c.call_id == parked.call_id)
        await self._count(statement.values({**vars(parked), "parked_at": now()}))

    async def waiting_for(self, call_id: str) -> Wait | None:
        """Return the wait in a call, also one that has ended; None if there is none."""
        return await self._one_or_none(Wait, _waits(PARKED_PROGRAMS.c.call_id == call_id))

    async def copy(self, copied: CopiedProgram) -> None:
        """Let a requested round run a program of another chat, instead of asking the model."""
        answered = {"answer": copied.answer, "code": copied.code, "model": copied.model}
        is_it = (ROUNDS.c.id == copied.round_id) & (ROUNDS.c.state == RoundState.REQUESTED)
        await self._rows(update(ROUNDS).where(is_it).values(**answered, answered_at=now(), not_resumable=""))
        values = {
            "call_id": copied.round_id,
            "program_id": copied.round_id,
            "chat_key": copied.chat_key,
            "turn_id": None,
            "kind": WaitKind.COPY,
            "about": vars(copied.origin),
            "until": None,
            "answers": copied.answers,
            "notes": copied.notes,
            "parked_at": now(),
        }
        await self._rows(insert(self._dialect, PARKED_PROGRAMS).values(values))

    async def origin(self, program_id: str) -> ProgramOrigin | None:
        """Return the program of another chat that a program goes on with; None if there is none."""
        statement = select(PARKED_PROGRAMS.c.about).where(
            PARKED_PROGRAMS.c.call_id == program_id, PARKED_PROGRAMS.c.kind == WaitKind.COPY
        )
        rows = await self._rows(statement)
        about = next((row[0] for row in rows), None)
        return None if about is None else ProgramOrigin(**about)

    async def drop_copies(self, ended: Round, following: str | None) -> list[Round]:
        """Keep rounds from going on after a program as it ended in another chat, if it has had another end.

        Args:
            following: the round that asks the model what follows; it may be one of them.

        Returns:
            Those that are merged into the round that has ended.
        """
        origin = await self.origin(ended.program_id or ended.id)
        if origin is None or origin.stop_type in (None, ended.stop_type):
            return []
        copies = (PARKED_PROGRAMS.c.chat_key == ended.chat_key) & (PARKED_PROGRAMS.c.kind == WaitKind.COPY)
        waits = (ROUNDS.c.state == RoundState.REQUESTED) & (ROUNDS.c.turn_id == ended.turn_id)
        waits &= ROUNDS.c.id.in_(select(PARKED_PROGRAMS.c.call_id).where(copies))
        asks = dict.fromkeys(("answer", "code", "model", "answered_at", "not_resumable"))
        await self._rows(update(ROUNDS).where(waits, ROUNDS.c.id == following).values(asks))
        await self._rows(delete(PARKED_PROGRAMS).where(copies, PARKED_PROGRAMS.c.call_id == following))
        moot = update(ROUNDS).where(waits).values(values_of_merged(ended.id))
        return await self._all(Round, moot.returning(ROUNDS))

    async def of_program(self, program_id: str) -> list[ParkedProgram]:
        """List the waits of a program, in order."""
        statement = select(PARKED_PROGRAMS).where(PARKED_PROGRAMS.c.program_id == program_id)
        return await self._all(ParkedProgram, statement.order_by(PARKED_PROGRAMS.c.parked_at))

    async def count(self, *, chat_key: str, program_id: str) -> tuple[int, int]:
        """Return how many waits of a chat are open, and how often a program has waited."""
        of_chat = select(func.count()).where(PARKED_PROGRAMS.c.chat_key == chat_key, _is_open())
        of_program = select(func.count()).where(PARKED_PROGRAMS.c.program_id == program_id)
        return int(await self._scalar(of_chat)), int(await self._scalar(of_program))

    async def open_for_job(self, chat_key: str, job_id: str) -> list[Wait]:
        """List the open waits of a chat for the end of a job."""
        is_for_it = (PARKED_PROGRAMS.c.kind == WaitKind.JOB) & (PARKED_PROGRAMS.c.subject == job_id)
        return await self._all(Wait, _waits(PARKED_PROGRAMS.c.chat_key == chat_key, _is_open(), is_for_it))

    async def question_for(self, chat_key: str, user_id: str | None) -> Wait | None:
        """Return the oldest open question of a chat that a person may answer; None if there is none."""
        values = {"of_chat": chat_key, "of_user": user_id}
        return await self._one_or_none(Wait, _question_statement, values)

    async def due(self, *, limit: int) -> list[Wait]:
        """List open waits whose time has come but those for approval, the oldest first."""
        statement = _waits(_is_open(), _is_no_approval(), PARKED_PROGRAMS.c.until <= now())
        return await self._all(Wait, statement.order_by(PARKED_PROGRAMS.c.until).limit(limit))

    async def seconds_until_due(self) -> float | None:
        """Return the seconds until the time of the next open wait comes; None without one."""
        statement = select(func.min(PARKED_PROGRAMS.c.until), now()).where(_is_open(), _is_no_approval())
        first, at = next(iter(await self._rows(statement)))
        return None if first is None else float((first - at).total_seconds())

    async def sandboxes(self) -> set[str]:
        """Return the container keys of chats whose programs wait or have a round to run: they need files."""
        return set((await self._rows(select(CHATS.c.container_key).where(_goes_on()))).scalars())

    async def states(self, call_ids: Sequence[str]) -> dict[str, CallState]:
        """Return the states of calls that programs wait or waited in; missing ones have been deleted."""
        if not call_ids:
            return {}
        statement = select(CALLS.c.id, CALLS.c.state).where(CALLS.c.id.in_(call_ids))
        return {call_id: CallState(state) for call_id, state in await self._rows(statement)}

    async def open_of_chat(
        self, chat_key: str, *, turn_id: str | None = None, round_id: str | None = None
    ) -> list[Wait]:
        """List the open waits of a chat but those for approval, in order.

        Args:
            turn_id, round_id: only those of one turn or round; None does not limit.
        """
        statement = _waits(PARKED_PROGRAMS.c.chat_key == chat_key, _is_open(), _is_no_approval())
        if turn_id is not None:
            statement = statement.where(PARKED_PROGRAMS.c.turn_id == turn_id)
        if round_id is not None:
            of_round = select(CALLS.c.id).where(CALLS.c.round_id == round_id)
            statement = statement.where(PARKED_PROGRAMS.c.call_id.in_(of_round))
        return await self._all(Wait, statement.order_by(PARKED_PROGRAMS.c.parked_at))


class AwaitingCallRepository(Repository):
    """Rows of ``calls`` in state AWAITING; what ends one ends the wait of its program."""

    async def add(self, request: CallRequest) -> None:
        """Record a call that awaits something; a call that has a row is not changed."""
        values = values_of(request, CallRequest)
        new = insert(self._dialect, CALLS).values(**values, state=CallState.AWAITING, requested_at=now())
        await self._rows(new.on_conflict_do_nothing(index_elements=[CALLS.c.id]))

    async def release(self, call_id: str, *, invocation: dict[str, Any], deadline: datetime) -> Call | None:
        """Queue a call that was approved, detached from its caller; None if it does not await approval."""
        return await self._end_wait(
            call_id,
            {
                "state": CallState.QUEUED,
                "invocation": invocation,
                "deadline": deadline,
                "published_at": now(),
                "detached_at": now(),
            },
        )

    async def refuse(
        self,
        call_id: str,
        *,
        error_type: str,
        error_message: str,
        invocation: dict[str, Any] | None = None,
    ) -> Call | None:
        """Fail a call that was not approved; None if it does not await approval.

        Args:
            invocation: replaces the stored one; None keeps it.
        """
        values: dict[str, Any] = {
            "state": CallState.FAILED,
            "finished_at": now(),
            "detached_at": now(),
            "error_type": error_type,
            "error_message": error_message,
        }
        if invocation is not None:
            values["invocation"] = invocation
        return await self._end_wait(call_id, values)

    async def complete(
        self,
        call_id: str,
        *,
        outcome: dict[str, Any] | None,
        error_type: str | None = None,
        error_message: str | None = None,
    ) -> Call | None:
        """End a call that awaited something else than approval; None if it does not await anything.

        Args:
            outcome: in the form that workers store; None: the call failed with the error.
        """
        values = {
            "state": CallState.FAILED if outcome is None else CallState.DONE,
            "finished_at": now(),
            "outcome": outcome,
            "error_type": error_type,
            "error_message": error_message,
        }
        return await self._end_wait(call_id, values)

    async def cancel(self, call_ids: Sequence[str], *, reason: str) -> None:
        """Cancel calls; those that do not await anything are not changed."""
        values = {
            "state": CallState.CANCELLED,
            "finished_at": now(),
            "detached_at": now(),
            "error_type": "CallCancelledError",
            "error_message": reason,
        }
        for begin in range(0, len(call_ids), _BATCH):
            batch = call_ids[begin : begin + _BATCH]
            is_open = CALLS.c.id.in_(batch) & (CALLS.c.state == CallState.AWAITING)
            await self._rows(update(CALLS).where(is_open).values(values))
            await self._close(batch)

    async def _end_wait(self, call_id: str, values: dict[str, Any]) -> Call | None:
        statement = update(CALLS).where(CALLS.c.id == call_id, CALLS.c.state == CallState.AWAITING)
        ended = await self._one_or_none(Call, statement.values(**values).returning(CALLS))
        if ended is not None:
            await self._close([call_id])
        return ended

    async def _close(self, call_ids: Sequence[str]) -> None:
        statement = update(PARKED_PROGRAMS).where(PARKED_PROGRAMS.c.call_id.in_(call_ids), _is_open())
        await self._rows(statement.values(until=None))


def _goes_on() -> ColumnElement[bool]:
    """SQL: a program of the chat waits, its approved call runs, or a round of it is open."""
    approved = select(PARKED_PROGRAMS.c.chat_key).join(CALLS, CALLS.c.id == PARKED_PROGRAMS.c.call_id)
    chats = union(
        select(PARKED_PROGRAMS.c.chat_key).where(_is_open()),
        approved.where(is_one_of(CALLS.c.state, CallState.QUEUED, CallState.RUNNING)),
        select(ROUNDS.c.chat_key).where(is_one_of(ROUNDS.c.state, RoundState.REQUESTED, RoundState.RUNNING)),
    )
    return CHATS.c.chat_key.in_(chats)


def _waits(*conditions: ColumnElement[bool]) -> Select[Any]:
    return select(*columns_of(PARKED_PROGRAMS, Wait)).where(*conditions)


@FixedStatement
def _question_statement(_dialect: str) -> Executable:
    subject = PARKED_PROGRAMS.c.subject
    is_asked = or_(subject.is_(None), subject == bindparam("of_user", type_=subject.type))
    is_question = (PARKED_PROGRAMS.c.kind == WaitKind.ANSWER) & is_asked
    questions = _waits(PARKED_PROGRAMS.c.chat_key == bindparam("of_chat"), _is_open(), is_question)
    return questions.order_by(PARKED_PROGRAMS.c.parked_at).limit(1)


def _is_open() -> ColumnElement[bool]:
    return PARKED_PROGRAMS.c.until.is_not(None)


def _is_no_approval() -> ColumnElement[bool]:
    return PARKED_PROGRAMS.c.kind != WaitKind.APPROVAL
