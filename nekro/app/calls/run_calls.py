"""The calls of one run of a program: what it may call, what it has called, and what it does not call again.

A call of a repeated program is answered from its journal. A call that waits for a decision or another event
ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from nekro.app.calls.journal import ProgramJournal, ReadingNotes, program_ids
from nekro.app.calls.records import (
    WITHDRAWN,
    end_of_row,
    still_running,
    was_decided,
)
from nekro.app.catalogue import WAIT_TASKS, built_in_entries
from nekro.broker.calls import envelope_of
from nekro.broker.program_calls import ProgramCall
from nekro.broker.tracing.tool_span import ToolSpan, tool_span
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import refuse_unfit, refuse_unfit_text
from nekro.sandbox.models import (
    ARGUMENT_ERROR,
    STOPS,
    Raised,
    Returned,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.wire.invocation import Envelope
from nekro.wire.values import arguments_text
from nekro_agent.errors import (
    ApprovalDeniedError,
    ArgumentError,
    BrokerError,
    CallTimeoutError,
    MethodFailedError,
    NekroError,
    NotApprovedError,
    StorageError,
    WaitRefusedError,
)
from nekro_agent.methods import SandboxMethodType
from nekro_agent.shared_clock import shared_time
from storage.states import CallState

if TYPE_CHECKING:
    from nekro.app.calls.dispatch import CallScope, Dispatcher
    from storage.repositories.calls import Call

__all__ = ["CallObserver", "CallRecord", "Program", "RunCalls"]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One call of a run, for the run's report."""

    call_id: str
    method: str
    #: Short name of the method in the code that called it: its function's, or its alias; None: it has none.
    called_as: str | None
    type: SandboxMethodType
    lane: str
    #: When the caller sent it; ``duration_ms`` is from then to its answer.
    requested_at: datetime
    duration_ms: float
    #: When the method started and ended; None when it failed.
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: None when it succeeded; else ``<type>: <message>`` as the sandbox saw it.
    error: str | None = None
    #: Follow-up round that it requested.
    round_id: str | None = None
    #: "" when unknown.
    worker: str = ""
    #: Whether it continued as a job after its caller stopped waiting.
    is_detached: bool = False
    #: The request for approval that it waits for; then it has not run.
    approval_id: str | None = None
    #: Whether its program waits in it for something else.
    is_waiting: bool = False
    #: How many characters of ``Round.readings`` the program had read at most when it made the call.
    read: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program whose calls a run makes."""

    #: Names its run, and its marks in the broker.
    run_id: str
    #: Whether it is run again if its worker dies.
    is_resumable: bool = False
    #: Whether it goes on after a decision on a call; else its model is asked.
    parks: bool = False
    #: What it did in earlier attempts; None: this is the first one.
    journal: ProgramJournal | None = None
    #: A program with more bytes of answers and readings than this is not run again.
    journal_bytes: int = 0
    #: Awaited with the reason, once, before the call that exceeds this.
    on_unresumable: Callable[[str], Awaitable[None]] | None = None


class CallObserver(Protocol):
    """Sees the calls of one run; its methods must neither block nor raise."""

    def call_started(self, entry: MethodEntry, call: StubCall, *, lane: str) -> None:
        """A call is about to be sent."""
        ...

    def call_ended(self, call: CallRecord, envelope: Envelope | None) -> None:
        """A call has ended; the envelope is None if there is no result."""
        ...


class RunCalls:
    """The methods of one run: what the sandbox may call and has called."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        scope: CallScope,
        entries: Iterable[MethodEntry],
        *,
        program: Program,
        observer: CallObserver | None = None,
        before_call: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create the calls of one run.

        Args:
            entries: the methods that the code may call.
            before_call: awaited before each call; if it raises, the call is not made.
        """
        self._dispatcher = dispatcher
        self._program = program
        #: As ``RunRequest.seed``.
        origin = None if program.journal is None else program.journal.origin
        chat_key = scope.chat.chat_key
        self._ids, self.seed = program_ids(dispatcher.secrets, origin, program.run_id, chat_key)
        self._readings = ReadingNotes("" if program.journal is None else program.journal.read)
        #: Bytes of answers so far, and whether there are too many of them and of readings.
        self._answers_bytes = 0
        self._is_unresumable = not program.is_resumable
        self._scope = scope
        self._observer = observer
        self._before_call = before_call
        self._entries: dict[str, MethodEntry] = {}
        self._names: dict[str, str | None] = {}
        self.stubs: list[StubMethod] = []
        #: The call that waits for something, whether the program goes on then, and the lock of asking calls.
        self._waiting_call: str | None = None
        self._goes_on = False
        self._asking = asyncio.Lock()
        #: Finished calls, in the order of their ends.
        self.records: list[CallRecord] = []
        for entry in entries:
            for name in dispatcher.registry.bare_names(entry) or (None,):
                self._add_stub(entry, name)
        for entry in built_in_entries(in_round=scope.round_id is not None):
            self._add_stub(entry, entry.name)

    def _add_stub(self, entry: MethodEntry, name: str | None) -> None:
        # Numbered: names of plugins collide with each other and may be longer than a token.
        token = f"method_{len(self._entries)}"
        self._entries[token] = entry
        self._names[token] = name
        self.stubs.append(
            StubMethod(
                token=token,
                name=name,
                path=entry.task,
                signature=entry.signature,
                doc=entry.doc,
                type=entry.type,
                timeout_seconds=None,
            )
        )

    def misfit(self, token: str, count: int, names: Sequence[str]) -> str | None:
        """Return why a call with so many positional and these named arguments cannot be made, None if it can.

        The text is that of a worker.
        """
        try:
            refuse_unfit(self._entries[token], count, names)
        except ArgumentError as exc:
            return str(exc)
        return None

    def id_of(self, token: str, arguments: bytes, readings: str) -> str:
        """Return the id of the next call with this token and these arguments; see ``CallIds``.

        Args:
            readings: as ``StubCall.readings``; kept, also if the call is not dispatched.
        """
        self._readings.add(readings)
        entry = self._entries.get(token)
        return self._ids.next("" if entry is None else entry.task, arguments)

    def all_readings(self, last: str) -> str | None:
        """Return what the program has read, as ``RunRequest.readings``; None: nothing, or it cannot say.

        Args:
            last: ``RunResult.readings``.
        """
        self._readings.add(last)
        before = "" if self._program.journal is None else self._program.journal.read
        return None if self._readings.are_lost else (before + self._readings.text).rstrip(",") or None

    @property
    def parks_at(self) -> str | None:
        """The call in which the program waits, to go on then; None: it waits in none, or ends there."""
        return self._waiting_call if self._goes_on and not self._is_unresumable else None

    async def to_park(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return what a repetition needs that is only in Redis: results and notes of calls without rows.

        Those that the journal has from an earlier wait are left out.

        Raises:
            BrokerUnavailableError: Redis does not answer.
        """
        journal, chat_key, run_id = self._program.journal, self._scope.chat.chat_key, self._program.run_id
        known = set() if journal is None else journal.kept
        made = [record.call_id for record in self.records if record.type is SandboxMethodType.TOOL]
        answers = await self._dispatcher.results(chat_key, [one for one in made if one not in known])
        marks = await self._dispatcher.marks(chat_key, run_id)
        notes = {one: mark.note for one, mark in marks.items() if mark.note and one not in known}
        if self._waiting_call is not None and (note := self._readings.take()):
            notes[f"after {self._waiting_call}"] = note
        return answers, notes

    @property
    def is_repeating(self) -> bool:
        """Whether all calls so far were made by an earlier attempt of the program."""
        return self._program.journal is not None and self._program.journal.is_repeating

    async def dispatch(self, call: StubCall) -> StubResult:
        """Execute one call of the sandbox; failures of the call are returned, not raised."""
        if self._before_call is not None:
            await self._before_call()
        entry = self._entries[call.token]
        await self._dispatcher.refresh()
        lane = self._dispatcher.lane_of(entry)
        with tool_span(entry.task, kind=entry.type.value, call_id=call.call_id, lane=lane) as part:
            part.arguments(call.arguments)
            await self._weigh()
            result = await self._carry(entry, call, lane, part)
            if isinstance(result, Returned):
                await self._weigh(len(result.value))
            return result

    async def _carry(self, entry: MethodEntry, call: StubCall, lane: str, part: ToolSpan) -> StubResult:
        record = self._recorder(entry, call, lane)
        if self._observer is not None:
            self._observer.call_started(entry, call, lane=lane)
        try:
            arguments = arguments_text(call.arguments)
            refuse_unfit_text(entry, arguments)
            if (known := await self._known(entry, call)) is not None:
                return self._answer_again(entry, known, record)
            if (stored := self._stored(call)) is not None:
                return self._answer_stored(stored, record)
            if entry.task in WAIT_TASKS:
                return await self._wait(entry, call.call_id, arguments, lane, record)
            if entry.requires_approval and await self._waits(entry, call.call_id, arguments, lane, record):
                part.set_attributes(awaits_approval=self._waiting_call == call.call_id)
                return Stopped(stop=StopType.APPROVAL)
            envelope = await self._send(entry, arguments, call.call_id, lane)
        except _DivergedError as exc:
            record(error=f"cancelled: {exc}")
            return Stopped(stop=StopType.DIVERGED)
        except NekroError as exc:
            part.fail(type(exc).__name__)
            return _fail(exc, record)
        except asyncio.CancelledError:
            record(error="cancelled: its deadline passed, or its run ended")
            raise
        if envelope is None:
            part.set_attributes(is_detached=True)
            record(is_detached=True)
            return still_running(entry, call.call_id)
        part.set_attributes(follow_up_round_id=envelope.round_id)
        part.result(envelope)
        return _succeed(envelope, record)

    async def _send(self, entry: MethodEntry, arguments: str, call_id: str, lane: str) -> Envelope | None:
        program, note = None, self._note_of(call_id)
        if self._program.is_resumable:
            program = ProgramCall(self._program.run_id, call_id, note)
        try:
            return await self._dispatcher.invoke_or_detach(
                entry, arguments, self._scope, call_id=call_id, lane=lane, program=program
            )
        except (ArgumentError, BrokerError, StorageError):  # it was not sent, or may not have been
            self._readings.put_back(note)
            raise

    def _note_of(self, call_id: str) -> str:
        """Return the note that a call takes to the journal; one that was made before keeps its own."""
        journal = self._program.journal
        return "" if journal is not None and journal.has(call_id) else self._readings.take()

    def _stored(self, call: StubCall) -> dict[str, Any] | None:
        """Return the result of a call without a row that an earlier attempt of the program received."""
        journal = self._program.journal
        return None if journal is None else journal.answers.get(call.call_id)

    def _answer_stored(self, stored: dict[str, Any], record: Callable[..., None]) -> StubResult:
        try:
            return _succeed(envelope_of(stored), record)
        except NekroError as exc:
            return _fail(exc, record)

    async def _known(self, entry: MethodEntry, call: StubCall) -> Call | None:
        """Return the row of a call that an earlier attempt of the program made, and that has ended.

        Raises:
            _DivergedError: the program takes another course than before.
        """
        journal = self._program.journal
        if journal is None:
            return None
        row = journal.take(call.call_id)
        is_new = row is None and call.call_id not in journal.answers
        if is_new and entry.is_claimed and not await journal.is_followed():
            raise _DivergedError("the program has taken another course than before it was interrupted")
        if row is not None and (end_of_row(row) or (row.detached_at is not None and not was_decided(row))):
            return row
        return None

    def _answer_again(self, entry: MethodEntry, row: Call, record: Callable[..., None]) -> StubResult:
        if row.detached_at is not None and not was_decided(row):
            record(is_detached=True)
            return still_running(entry, row.id)
        end = end_of_row(row)
        if isinstance(end, NotApprovedError):
            return _fail(ApprovalDeniedError(str(end)), record)
        if row.state is CallState.CANCELLED and row.error_message == WITHDRAWN:
            end = CallTimeoutError(f"{row.method}: no answer to call {row.id} before its deadline")
        if isinstance(end, NekroError):
            return _fail(end, record)
        return _succeed(Envelope.model_validate(end), record)

    async def _weigh(self, size: int = 0) -> None:
        """Count what a repetition of the program would need; records when it is too much."""
        self._answers_bytes += size
        is_too_much = self._answers_bytes + len(self._readings) > self._program.journal_bytes
        if self._is_unresumable or not (is_too_much or self._readings.are_lost):
            return
        self._is_unresumable = True
        reason = f"its calls have more than {self._program.journal_bytes} bytes (NEKRO_AGENT__JOURNAL_BYTES)"
        if self._readings.are_lost:
            reason = "it has read clocks, or changed files, more than can be repeated"
        if self._program.on_unresumable is not None:
            await self._program.on_unresumable(reason)

    async def _wait(
        self, entry: MethodEntry, call_id: str, arguments: str, lane: str, record: Callable[..., None]
    ) -> StubResult:
        """Begin to wait in a call, unless what it waits for has come."""
        if self._scope.round_id is None:
            raise WaitRefusedError(f"{entry.name}: only a program of a turn can wait")
        if self._is_unresumable:
            raise WaitRefusedError(f"{entry.name}: this program cannot wait, because it cannot be run again")
        async with self._asking:
            if self._is_refused(record):
                return Stopped(stop=StopType.WAITING)
            note = self._note_of(call_id)
            try:
                ended = await self._dispatcher.begin_wait(
                    entry,
                    arguments,
                    self._scope,
                    call_id=call_id,
                    lane=lane,
                    program_id=self._program.run_id,
                    note=note,
                )
            except NekroError:  # it does not wait
                self._readings.put_back(note)
                raise
            if ended is not None:
                return self._answer_again(entry, ended, record)
            self._waiting_call, self._goes_on = call_id, True
            record(is_waiting=True)
            return Stopped(stop=StopType.WAITING)

    def _is_refused(self, record: Callable[..., None]) -> bool:
        """Whether a call must not be made because another one of the run waits."""
        if self._waiting_call is None:
            return False
        record(error=f"cancelled: the program waits in call {self._waiting_call}")
        return True

    async def _waits(
        self, entry: MethodEntry, call_id: str, arguments: str, lane: str, record: Callable[..., None]
    ) -> bool:
        """Whether a call must wait for approval; the first one of the run waits, and others do not run."""
        async with self._asking:
            if self._is_refused(record):
                return True
            goes_on = self._program.parks and not self._is_unresumable and entry.type not in STOPS
            note = self._note_of(call_id)
            approval_id = None
            try:
                approval_id = await self._dispatcher.admit(
                    entry,
                    arguments,
                    self._scope,
                    call_id=call_id,
                    lane=lane,
                    program_id=self._program.run_id if goes_on else None,
                    note=note,
                )
            finally:
                if approval_id is None:  # it may be sent, or no person was asked
                    self._readings.put_back(note)
            if approval_id is None:
                return False
            self._waiting_call, self._goes_on = call_id, goes_on
            record(approval_id=approval_id)
            return True

    def _recorder(self, entry: MethodEntry, call: StubCall, lane: str) -> Callable[..., None]:
        """Start the record of a call; the returned function completes it with the known fields."""
        requested_at, begin, read = shared_time(), monotonic(), len(self._readings)

        def record(envelope: Envelope | None = None, **known: Any) -> None:
            ended = CallRecord(
                call_id=call.call_id,
                method=entry.task,
                called_as=self._names[call.token],
                type=entry.type,
                lane=lane,
                requested_at=requested_at,
                duration_ms=(monotonic() - begin) * 1000,
                read=read,
                **known,
            )
            self.records.append(ended)
            if self._observer is not None:
                self._observer.call_ended(ended, envelope)

        return record


class _DivergedError(NekroError):
    """A repeated program takes another course; never leaves this module."""


def _succeed(envelope: Envelope, record: Callable[..., None]) -> StubResult:
    record(
        envelope,
        started_at=envelope.started_at,
        finished_at=envelope.finished_at,
        round_id=envelope.round_id,
        worker=envelope.worker,
    )
    stop = STOPS.get(envelope.type)
    return Stopped(stop=stop) if stop is not None else Returned(value=envelope.value_bytes())


def _fail(error: NekroError, record: Callable[..., None]) -> Raised:
    raised = _raised(error)
    record(error=f"{raised.error_type}: {raised.message}")
    return raised


def _raised(exc: NekroError) -> Raised:
    if isinstance(exc, ArgumentError):
        return Raised(error_type=ARGUMENT_ERROR, message=str(exc))
    if isinstance(exc, MethodFailedError):
        return Raised(error_type=exc.error_type, message=exc.error_message)
    return Raised(error_type=type(exc).__name__, message=str(exc))
