"""Turns a stub call of a sandbox into a task on a worker: identity, deadline, form of the answer.

The sandbox supplies the stub's token and the arguments; everything else in the invocation
comes from the ``CallScope`` that the host created before the sandbox started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from loguru import logger

from broker_config.settings import WorkerSettings
from nekro.app.calls.records import lane_seconds, still_running, wait_seconds
from nekro.app.catalogue import built_in_entries
from nekro.broker.calls import MethodCaller
from nekro.broker.tracing.tool_span import ToolSpan, tool_span
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry, refuse_unfit, refuse_unfit_text
from nekro.plugins.lanes import LaneChooser
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
from nekro.wire.invocation import Envelope, Invocation, new_id
from nekro.wire.values import arguments_text
from nekro_agent.errors import (
    ArgumentError,
    BrokerError,
    MethodFailedError,
    NekroError,
    NotApprovedError,
    OutcomeUnknownError,
    StorageError,
)
from nekro_agent.methods import SandboxMethodType
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time

if TYPE_CHECKING:
    from nekro.app.calls.detached import CallDetacher

__all__ = [
    "ApprovalGate",
    "CallObserver",
    "CallRecord",
    "CallScope",
    "Dispatcher",
    "RunCalls",
]


#: Properties of a chat that its calls name.
_OF_CHAT: Final = (
    "chat_key",
    "container_key",
    "adapter_key",
    "channel_id",
    "channel_name",
    "channel_type",
)


@dataclass(frozen=True, kw_only=True)
class CallScope:
    """The chat and user on whose behalf calls are made; set by the host, never by the sandbox."""

    chat: ChatInfo
    user_id: str | None
    #: None outside rounds (the command line).
    round_id: str | None = None
    turn_id: str | None = None
    #: Position of the round in its turn, from 1; 0 outside rounds.
    round_number: int = 0
    #: Whether an AGENT result requests a follow-up round.
    wakes_agent: bool = True
    #: As ``Invocation.account_id``.
    account_id: str | None = None

    def call(
        self,
        called: MethodEntry | str,
        arguments: str,
        *,
        call_id: str,
        deadline: datetime,
        waits_until: datetime | None = None,
    ) -> Invocation:
        """Return one call on behalf of this chat and user.

        Args:
            called: a method, or the Celery task of another kind of call.
            arguments: their encoded text.
            waits_until: when its caller stops waiting; None means at the deadline.
        """
        given: dict[str, Any] = {"method": called}
        if not isinstance(called, str):
            given = {
                "method": called.task,
                "repeatable": called.repeatable,
                "is_recorded": called.is_claimed,
            }
        # An invocation has the fields of a scope and the identity of its chat, by the same names.
        return Invocation(
            **{name: getattr(self.chat, name) for name in _OF_CHAT},
            **{name: value for name, value in vars(self).items() if name != "chat"},
            **given,
            call_id=call_id,
            args=arguments,
            issued_at=shared_time(),
            deadline=deadline,
            waits_until=waits_until,
        )


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One call of a run, for the run's report."""

    call_id: str
    method: str
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


class CallObserver(Protocol):
    """Sees the calls of one run; its methods must neither block nor raise."""

    def call_started(self, entry: MethodEntry, call: StubCall, *, lane: str) -> None:
        """A call is about to be sent."""
        ...

    def call_ended(self, call: CallRecord, envelope: Envelope | None) -> None:
        """A call has ended; the envelope is None if there is no result."""
        ...


class ApprovalGate(Protocol):
    """Decides whether calls that require approval may be sent; see ``nekro.app.approvals.requests``."""

    async def admit(self, entry: MethodEntry, invocation: Invocation, *, lane: str) -> str | None:
        """Let a call pass that was approved before (None); else request approval, and return its id."""
        ...

    async def permit(self, invocation: Invocation, *, lane: str, by: str) -> object:
        """Record that the one who makes a call approves it."""
        ...


class Dispatcher:
    """Sends calls to workers; one instance serves all sandboxes of a process."""

    def __init__(
        self,
        caller: MethodCaller,
        registry: Registry,
        lanes: LaneChooser,
        settings: WorkerSettings,
        *,
        refresh: Callable[[], Awaitable[None]],
        detacher: Callable[[], CallDetacher],
        approvals: Callable[[], ApprovalGate],
    ) -> None:
        """Create a dispatcher.

        Args:
            refresh: updates ``lanes``; awaited before each call, so it must usually be a no-op.
            detacher: returns the writer of calls whose callers stop waiting; called at the first of them.
            approvals: returns what admits calls that require approval; called at the first of them.
        """
        self._caller = caller
        self._registry = registry
        self._lanes = lanes
        self._settings = settings
        self.refresh = refresh
        self._detacher = detacher
        self._approvals = approvals

    def for_run(
        self,
        scope: CallScope,
        entries: Iterable[MethodEntry],
        *,
        observer: CallObserver | None = None,
        before_call: Callable[[], Awaitable[None]] | None = None,
    ) -> RunCalls:
        """Return the stubs of one run and the object that dispatches their calls; ``observer`` sees these.

        Args:
            before_call: awaited before each call; if it raises, the call is not made.
        """
        return RunCalls(self, scope, list(entries), self._registry, observer, before_call)

    def lane_of(self, entry: MethodEntry) -> str:
        """Name of the lane that a method's calls use."""
        return self._lanes.lane_of(entry)

    async def admit(
        self, entry: MethodEntry, arguments: str, scope: CallScope, *, call_id: str, lane: str
    ) -> str | None:
        """Return None if a call may be sent, else the approval that it waits for; a decision sends it.

        Raises:
            ArgumentError, CallCancelledError, OutcomeUnknownError, StorageUnavailableError: see
                ``ApprovalRequests.admit``.
        """
        invocation = self.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
        return await self._approvals().admit(entry, invocation, lane=lane)

    def awaiting(
        self, entry: MethodEntry, arguments: str, scope: CallScope, *, call_id: str, lane: str
    ) -> Invocation:
        """Return the invocation of a call whose result no caller awaits."""
        # The result wakes the agent, even where the round itself was the last one of its turn.
        scope = replace(scope, wakes_agent=scope.wakes_agent or scope.round_id is not None)
        deadline = shared_time() + timedelta(seconds=lane_seconds(self._settings, lane))
        return scope.call(entry, arguments, call_id=call_id, deadline=deadline)

    async def invoke_or_detach(
        self, entry: MethodEntry, arguments: str, scope: CallScope, *, call_id: str, lane: str
    ) -> Envelope | None:
        """Run a method on a worker and wait for its result for the configured time.

        Returns None when the wait ended first: the call continues as a job, and the worker that
        ends it informs the chat.

        Args:
            lane: the result of ``lane_of`` for the method.

        Raises:
            ArgumentError, MethodFailedError, CallTimeoutError, BrokerUnavailableError and the
                other errors of ``MethodCaller.call``; also StorageUnavailableError: a call that nothing waits
                for was not recorded, so it will not run.
        """
        patience = wait_seconds(entry, lane=lane, settings=self._settings)
        now = shared_time()
        deadline = now + timedelta(seconds=lane_seconds(self._settings, lane))
        invocation = scope.call(
            entry,
            arguments,
            call_id=call_id,
            deadline=deadline,
            waits_until=min(deadline, now + timedelta(seconds=patience)),
        )
        if patience == 0:
            # The row comes first: it guarantees a report to the chat even if the message is lost.
            await self._detacher().detach(entry, invocation, lane=lane)
            await self._send_detached(invocation, lane)
            return None

        async def leave() -> bool:
            row = await self._detacher().detach(entry, invocation, lane=lane)
            return row.finished_at is None

        return await self._caller.call_or_detach(invocation, lane=lane, seconds=patience, leave=leave)

    async def _send_detached(self, invocation: Invocation, lane: str) -> None:
        call_id = invocation.call_id
        try:
            await self._caller.send(invocation, lane=lane)
        except OutcomeUnknownError as exc:  # it may run; the end of its row is reported to the chat
            logger.bind(call_id=call_id, error=str(exc)).warning("call_sent_unconfirmed")
        except (BrokerError, StorageError):
            try:
                await self._detacher().withdraw(call_id)
            except StorageError as exc:  # the call will not run, and the sweep ends its job
                logger.bind(call_id=call_id, error=str(exc)).warning("call_not_withdrawn")
            raise

    async def invoke_once(
        self,
        entry: MethodEntry,
        arguments: str,
        *,
        chat: ChatInfo,
        user_id: str | None,
        timeout_seconds: float | None,
        call_id: str | None = None,
        approver: str | None = None,
    ) -> Envelope:
        """Run a method outside of a round; an AGENT result requests no round.

        Args:
            timeout_seconds: None means the limit of the method's lane.
            call_id: None makes a new one.
            approver: who approves the call by making it; None: the call is not approved.

        Raises:
            NotApprovedError: the method requires approval, and there is no approver.
        """
        if entry.requires_approval and approver is None:
            raise NotApprovedError(f"{entry.task} requires approval, and this caller cannot approve it")
        await self.refresh()
        call_id, lane = call_id or new_id(), self.lane_of(entry)
        seconds = lane_seconds(self._settings, lane) if timeout_seconds is None else timeout_seconds
        scope = CallScope(chat=chat, user_id=user_id, wakes_agent=False, account_id=call_id)
        deadline = shared_time() + timedelta(seconds=seconds)
        with tool_span(entry.task, kind=entry.type.value, call_id=call_id, lane=lane):
            invocation = scope.call(entry, arguments, call_id=call_id, deadline=deadline)
            if entry.requires_approval and approver is not None:
                await self._approvals().permit(invocation, lane=lane, by=approver)
            return await self._caller.call(invocation, lane=lane)


class RunCalls:
    """The methods of one run: what the sandbox may call and has called."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        scope: CallScope,
        entries: Sequence[MethodEntry],
        registry: Registry,
        observer: CallObserver | None,
        before_call: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._scope = scope
        self._observer = observer
        self._before_call = before_call
        self._entries: dict[str, MethodEntry] = {}
        self.stubs: list[StubMethod] = []
        #: The call that waits for approval, and the lock of those that ask.
        self._waiting_call: str | None = None
        self._asking = asyncio.Lock()
        #: Finished calls, in the order of their ends.
        self.records: list[CallRecord] = []
        for entry in entries:
            for name in registry.bare_names(entry) or (None,):
                self._add_stub(entry, name)
        for entry in built_in_entries(in_round=scope.round_id is not None):
            self._add_stub(entry, entry.name)

    def _add_stub(self, entry: MethodEntry, name: str | None) -> None:
        # Numbered: names of plugins collide with each other and may be longer than a token.
        token = f"method_{len(self._entries)}"
        self._entries[token] = entry
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

    async def dispatch(self, call: StubCall) -> StubResult:
        """Execute one call of the sandbox; failures of the call are returned, not raised."""
        if self._before_call is not None:
            await self._before_call()
        entry = self._entries[call.token]
        await self._dispatcher.refresh()
        lane = self._dispatcher.lane_of(entry)
        with tool_span(entry.task, kind=entry.type.value, call_id=call.call_id, lane=lane) as part:
            part.arguments(call.arguments)
            return await self._carry(entry, call, lane, part)

    async def _carry(self, entry: MethodEntry, call: StubCall, lane: str, part: ToolSpan) -> StubResult:
        record = self._recorder(entry, call.call_id, lane)
        if self._observer is not None:
            self._observer.call_started(entry, call, lane=lane)
        try:
            arguments = arguments_text(call.arguments)
            refuse_unfit_text(entry, arguments)
            if entry.requires_approval and await self._waits(entry, call.call_id, arguments, lane, record):
                part.set_attributes(awaits_approval=self._waiting_call == call.call_id)
                return Stopped(stop=StopType.APPROVAL)
            envelope = await self._dispatcher.invoke_or_detach(
                entry, arguments, self._scope, call_id=call.call_id, lane=lane
            )
        except NekroError as exc:
            raised = _raised(exc)
            part.fail(type(exc).__name__)
            record(error=f"{raised.error_type}: {raised.message}")
            return raised
        except asyncio.CancelledError:
            record(error="cancelled: its deadline passed, or its run ended")
            raise
        if envelope is None:
            part.set_attributes(is_detached=True)
            record(is_detached=True)
            return still_running(entry, call.call_id)
        part.set_attributes(follow_up_round_id=envelope.round_id)
        part.result(envelope)
        record(
            envelope,
            started_at=envelope.started_at,
            finished_at=envelope.finished_at,
            round_id=envelope.round_id,
            worker=envelope.worker,
        )
        stop = STOPS.get(envelope.type)
        return Stopped(stop=stop) if stop is not None else Returned(value=envelope.value_bytes())

    async def _waits(
        self, entry: MethodEntry, call_id: str, arguments: str, lane: str, record: Callable[..., None]
    ) -> bool:
        """Whether a call must wait for approval; the first one of the run waits, and others do not run."""
        async with self._asking:
            if self._waiting_call is not None:
                record(error=f"cancelled: call {self._waiting_call} of its run waits for approval")
                return True
            approval_id = await self._dispatcher.admit(
                entry, arguments, self._scope, call_id=call_id, lane=lane
            )
            if approval_id is None:
                return False
            self._waiting_call = call_id
            record(approval_id=approval_id)
            return True

    def _recorder(self, entry: MethodEntry, call_id: str, lane: str) -> Callable[..., None]:
        """Start the record of a call; the returned function completes it with the known fields."""
        requested_at, begin = shared_time(), monotonic()

        def record(envelope: Envelope | None = None, **known: Any) -> None:
            ended = CallRecord(
                call_id=call_id,
                method=entry.task,
                type=entry.type,
                lane=lane,
                requested_at=requested_at,
                duration_ms=(monotonic() - begin) * 1000,
                **known,
            )
            self.records.append(ended)
            if self._observer is not None:
                self._observer.call_ended(ended, envelope)

        return record


def _raised(exc: NekroError) -> Raised:
    if isinstance(exc, ArgumentError):
        return Raised(error_type=ARGUMENT_ERROR, message=str(exc))
    if isinstance(exc, MethodFailedError):
        return Raised(error_type=exc.error_type, message=exc.error_message)
    return Raised(error_type=type(exc).__name__, message=str(exc))
