"""Recorded calls, as their callers see them: a row is written before the message.

A call of a TOOL method that may run twice has no row unless it is detached: its caller repeats it when
the broker lost it, and if the caller has ended the result is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from broker_config.settings import WorkerSettings
from nekro.app.catalogue import built_in_entry
from nekro.app.retried_writes import write_with_retries
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.failures import error_named
from nekro.plugins.entries import MethodEntry
from nekro.sandbox.models import STOPS, Raised, Returned, Stopped, StubResult
from nekro.wire.values import encode_value
from nekro_agent.errors import (
    ArgumentError,
    CallCancelledError,
    MethodDisabledError,
    MethodNotFoundError,
    NekroError,
    NotApprovedError,
    OutcomeUnknownError,
)
from nekro_agent.methods import Lane, SandboxMethodType
from storage.states import CallState

if TYPE_CHECKING:
    from nekro.broker.calls import CallFate
    from nekro.plugins.entries import MethodEntry
    from nekro.plugins.entry_registry import Registry
    from nekro.wire.invocation import Envelope, Invocation
    from storage.engine import Database
    from storage.repositories.calls import Call, CallRequest
    from storage.transaction import Transaction

__all__ = [
    "WITHDRAWN",
    "CallRecords",
    "end_of_row",
    "error_of",
    "lane_seconds",
    "outcome_unknown",
    "still_running",
    "value_of",
    "wait_seconds",
    "was_decided",
]


def error_of(call: Call) -> NekroError:
    """The error for a call that ended without a result."""
    if call.state is CallState.CANCELLED:
        return CallCancelledError(f"call {call.id} was cancelled")
    if call.state is CallState.FAILED:
        return error_named(call.error_type or "Exception", call.error_message or "")
    return outcome_unknown(call)


def outcome_unknown(call: Call) -> OutcomeUnknownError:
    """The error for a call whose worker died inside it."""
    return OutcomeUnknownError(
        f"call {call.id} of {call.method}: a worker died inside it, so its effect may or may not have "
        "happened; check before you repeat it"
    )


#: Reason recorded for a call that its caller abandoned.
WITHDRAWN: Final = "withdrawn by its caller"


class CallRecords:
    """Records the calls that ``MethodCaller`` publishes; implements ``CallLedger``."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry

    def records(self, message: CallMessage) -> bool:
        """Whether the call is recorded: those of claimed methods; the worker refuses unknown ones."""
        entry = self._entry_of(message.invocation)
        return entry is not None and entry.is_claimed

    async def record(self, message: CallMessage, *, note: str = "") -> None:
        """Record a call; retries during a short outage of the database.

        Args:
            note: what its program read before it.

        Raises:
            StorageUnavailableError: the database does not answer; the call is not recorded.
            RecordUnknownError: the database does not answer and the call may be recorded.
        """
        request = self._request(message, readings=note or None)

        async def write(transaction: Transaction) -> None:
            if not await transaction.calls.enqueue(request):
                # It was detached before it was sent; the row has its recipient but not its message.
                await transaction.calls.keep_message(
                    request.id, request.invocation or {}, readings=request.readings
                )

        unknown = f"call {request.id} may or may not be recorded"
        try:
            await write_with_retries(self._database.autocommit, write, unknown=unknown)
        except OutcomeUnknownError as exc:  # the caller finds out whether the call runs
            from nekro.broker.calls import RecordUnknownError

            raise RecordUnknownError(str(exc)) from exc

    async def settle(self, message: CallMessage) -> CallFate:
        """Withdraw a call that has not started, or return its state. See ``CallLedger``."""
        from nekro.broker.calls import CallFate

        async with self._database.autocommit() as transaction:
            call = await transaction.calls.withdraw(self._request(message), reason=WITHDRAWN)
        if call.state is CallState.CANCELLED and call.error_message == WITHDRAWN:
            return CallFate()
        return _ended(call) or CallFate(is_running=True)

    async def end_of(self, call_id: str) -> dict[str, Any] | NekroError | None:
        """Return what a call returned, or its error; None if it is not recorded or has not ended.

        Raises:
            StorageError: the database does not answer.
        """
        async with self._database.read() as transaction:
            call = await transaction.calls.find(call_id)
        return None if call is None else end_of_row(call)

    async def withdraw(self, call_id: str) -> None:
        """Cancel a call that is not finished."""
        async with self._database.autocommit() as transaction:
            await transaction.calls.cancel(call_id, reason=WITHDRAWN)

    def _request(self, message: CallMessage, *, readings: str | None = None) -> CallRequest:
        # With SQLAlchemy, which a command that calls a TOOL method need not import.
        from storage.repositories.calls import CallRequest

        invocation = message.invocation
        entry = self._entry_of(invocation)
        return CallRequest(
            id=invocation.call_id,
            method=invocation.method,
            type=SandboxMethodType.TOOL if entry is None else entry.type,
            chat_key=invocation.chat_key,
            round_id=invocation.round_id,
            lane=message.lane,
            deadline=invocation.deadline,
            repeatable=invocation.repeatable,
            invocation=message.to_row(),
            readings=readings,
        )

    def _entry_of(self, invocation: Invocation) -> MethodEntry | None:
        built_in = built_in_entry(invocation.method, in_round=invocation.round_id is not None)
        if built_in is not None:
            return built_in
        try:
            return self._registry.find(invocation.method)
        except (MethodDisabledError, MethodNotFoundError):
            return None


def end_of_row(call: Call) -> dict[str, Any] | NekroError | None:
    """Return what a recorded call returned, or its error; None if it has not ended."""
    if call.state in (CallState.AWAITING, CallState.QUEUED, CallState.RUNNING):
        return None
    if call.state is CallState.DONE and call.outcome is not None:
        return call.outcome
    return error_of(call)


def was_decided(call: Call) -> bool:
    """Whether a person has decided on a call, or its request has expired: its program reads its end."""
    asked = (call.invocation or {}).get("invocation", {})
    return asked.get("approval_id") is not None or call.error_type == NotApprovedError.__name__


def _ended(call: Call) -> CallFate | None:
    from nekro.broker.calls import CallFate

    end = end_of_row(call)
    if end is None:
        return None
    return CallFate(error=end) if isinstance(end, NekroError) else CallFate(outcome=end)


def value_of(envelope: Envelope, *, max_bytes: int) -> object:
    """Return the method's result: parts, text or the decoded value, depending on the method's type."""
    from nekro.wire.values import decode_value

    if envelope.type.wakes_agent:
        return envelope.segments if envelope.segments is not None else envelope.text
    if envelope.value is None:
        return None
    try:
        return decode_value(envelope.value, max_bytes=max_bytes)
    except ArgumentError as exc:
        # The call succeeded, but only a sandbox may load the class of its value.
        return f"<{len(envelope.value)} bytes; {exc}>"


def lane_seconds(settings: WorkerSettings, lane: str) -> float:
    """Time limit of the calls of a lane, by its name."""
    return settings.long_timeout_seconds if lane == Lane.LONG.value else settings.call_timeout_seconds


def wait_seconds(entry: MethodEntry, *, lane: str, settings: WorkerSettings) -> float:
    """How long code waits for a call before the call is detached; 0 for effects of lane ``long``."""
    if lane == Lane.LONG.value and entry.type is not SandboxMethodType.TOOL:
        return 0.0
    return settings.wait_seconds


class CalledMethod(Protocol):
    """What ``still_running`` needs of a method."""

    @property
    def name(self) -> str:
        """Name of the function."""
        ...

    @property
    def type(self) -> SandboxMethodType:
        """How its result is used."""
        ...


def still_running(entry: CalledMethod, call_id: str) -> StubResult:
    """Return the result that code gets when its call is detached."""
    stop = STOPS.get(entry.type)
    if stop is not None:
        return Stopped(stop=stop)
    if entry.type is SandboxMethodType.BEHAVIOR:
        text = (
            f"{entry.name} is still running, as job {call_id}. Its result will appear in this chat when it "
            f'is done; do not call it again. wait_for_job("{call_id}") waits for it.'
        )
        return Returned(value=encode_value(text, max_bytes=1 << 16))
    return Raised(
        error_type="StillRunning",
        message=f"{entry.name} has no value yet: it continues as job {call_id}. Its value will appear in "
        "this chat when it is done, and you will be asked again; do not call it again. "
        f'wait_for_job("{call_id}") waits for it.',
    )
