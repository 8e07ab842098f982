"""Sends calls of methods to workers: identity, lane, deadline, how long the caller waits.

The sandbox supplies the stub's token and the arguments (``RunCalls``). Everything else in the invocation
comes from the ``CallScope`` that the host created before the sandbox started.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from loguru import logger

from broker_config.settings import WorkerSettings
from nekro.app.calls.records import (
    lane_seconds,
    wait_seconds,
)
from nekro.broker.calls import MethodCaller
from nekro.broker.program_calls import Marked, ProgramCall
from nekro.broker.tracing.tool_span import tool_span
from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.lanes import LaneChooser
from nekro.wire.invocation import Envelope, Invocation, new_id
from nekro.wire.seals import ProgramSecrets
from nekro_agent.errors import (
    BrokerError,
    NotApprovedError,
    OutcomeUnknownError,
    StorageError,
)
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time

if TYPE_CHECKING:
    from nekro.app.calls.detached import CallDetacher
    from storage.repositories.calls import Call

__all__ = ["ApprovalGate", "CallScope", "Dispatcher", "WaitGate"]


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


class ApprovalGate(Protocol):
    """Decides whether calls that require approval may be sent; see ``nekro.app.approvals.requests``."""

    async def admit(
        self,
        entry: MethodEntry,
        invocation: Invocation,
        *,
        lane: str,
        program_id: str | None = None,
        note: str = "",
    ) -> str | None:
        """Let a call pass that was approved before (None); else request approval, and return its id."""
        ...

    async def permit(self, invocation: Invocation, *, lane: str, by: str) -> object:
        """Record that the one who makes a call approves it."""
        ...


class WaitGate(Protocol):
    """Begins waits of programs; see ``nekro.app.calls.waits``."""

    async def begin(
        self, name: str, invocation: Invocation, *, lane: str, program_id: str, note: str
    ) -> Call | None:
        """Begin a wait; returns its call if that has ended, None if the program must wait."""
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
        waits: Callable[[], WaitGate],
        secrets: ProgramSecrets,
    ) -> None:
        """Create a dispatcher.

        Args:
            secrets: makes those of programs.
            refresh: updates ``lanes``; awaited before each call, so it must usually be a no-op.
            detacher: returns the writer of calls whose callers stop waiting; called at the first of them.
            approvals: returns what admits calls that require approval; called at the first of them.
            waits: returns what begins waits of programs; called at the first of them.
        """
        self._caller = caller
        self.registry = registry
        self._lanes = lanes
        self._settings = settings
        self.refresh = refresh
        self._detacher = detacher
        self._approvals = approvals
        self._waits = waits
        #: Makes those of programs.
        self.secrets = secrets

    async def marks(self, chat_key: str, run_id: str) -> Mapping[str, Marked]:
        """See ``MethodCaller.marks``."""
        return await self._caller.marks(chat_key, run_id)

    async def results(self, chat_key: str, call_ids: Sequence[str]) -> dict[str, Any]:
        """See ``MethodCaller.results``."""
        return await self._caller.results(chat_key, call_ids)

    def leaving(self, chat_key: str) -> AbstractContextManager[None]:
        """See ``MethodCaller.leaving``."""
        return self._caller.leaving(chat_key)

    def program_ended(self, chat_key: str, run_id: str) -> None:
        """Forget the marks of a program that is not run again."""
        self._caller.forget(chat_key, run_id)

    def lane_of(self, entry: MethodEntry) -> str:
        """Name of the lane that a method's calls use."""
        return self._lanes.lane_of(entry)

    async def admit(
        self,
        entry: MethodEntry,
        arguments: str,
        scope: CallScope,
        *,
        call_id: str,
        lane: str,
        program_id: str | None = None,
        note: str = "",
    ) -> str | None:
        """Return None if a call may be sent, else the approval that it waits for; a decision sends it.

        Args:
            program_id, note: see ``ApprovalRequests.admit``.

        Raises:
            ArgumentError, CallCancelledError, OutcomeUnknownError, StorageUnavailableError: see
                ``ApprovalRequests.admit``.
        """
        invocation = self.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
        return await self._approvals().admit(entry, invocation, lane=lane, program_id=program_id, note=note)

    async def begin_wait(
        self,
        entry: MethodEntry,
        arguments: str,
        scope: CallScope,
        *,
        call_id: str,
        lane: str,
        program_id: str,
        note: str,
    ) -> Call | None:
        """Begin the wait of a program in a call of a method of ``WAIT_TASKS``; see ``ProgramWaits.begin``."""
        invocation = self.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
        return await self._waits().begin(entry.name, invocation, lane=lane, program_id=program_id, note=note)

    def awaiting(
        self, entry: MethodEntry, arguments: str, scope: CallScope, *, call_id: str, lane: str
    ) -> Invocation:
        """Return the invocation of a call whose result no caller awaits."""
        # The result wakes the agent, even where the round itself was the last one of its turn.
        scope = replace(scope, wakes_agent=scope.wakes_agent or scope.round_id is not None)
        deadline = shared_time() + timedelta(seconds=lane_seconds(self._settings, lane))
        return scope.call(entry, arguments, call_id=call_id, deadline=deadline)

    async def invoke_or_detach(
        self,
        entry: MethodEntry,
        arguments: str,
        scope: CallScope,
        *,
        call_id: str,
        lane: str,
        program: ProgramCall | None = None,
    ) -> Envelope | None:
        """Run a method on a worker and wait for its result for the configured time.

        Returns None when the wait ended first: the call continues as a job, and the worker that
        ends it informs the chat.

        Args:
            lane: the result of ``lane_of`` for the method.
            program: as in ``MethodCaller.call_or_detach``.

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
            await self._send_detached(invocation, lane, program)
            return None

        async def leave() -> bool:
            row = await self._detacher().detach(entry, invocation, lane=lane)
            return row.finished_at is None

        return await self._caller.call_or_detach(
            invocation, lane=lane, seconds=patience, leave=leave, program=program
        )

    async def _send_detached(self, invocation: Invocation, lane: str, program: ProgramCall | None) -> None:
        call_id = invocation.call_id
        try:
            await self._caller.send(invocation, lane=lane, program=program)
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
