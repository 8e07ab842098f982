"""Runs of code on rounds workers, for processes that run none: sent as a task, which at most one worker runs.

A run has effects, so it is claimed by its id like a call: a second delivery never runs the code again. Its
output is published as live events of the chat that name the run as their call.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final

from broker_config.settings import Settings
from broker_config.topology import RUN_TASK
from nekro.app.calls.dispatch import CallScope
from nekro.app.catalogue.fleet import CatalogueReader
from nekro.app.chats.contexts import chat_of
from nekro.app.chats.live import LiveText, live_event
from nekro.app.chats.publisher import EventPublisher
from nekro.app.rounds.runs import CodeReport, CodeRuns
from nekro.broker.calls import MethodCaller
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments, decode_value, encode_arguments
from nekro_agent.execution.invoke import Outcome
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from storage.states import EventType
from workers.calls.handler import CallTarget, OnStep, TaskSubject

__all__ = ["CodeTarget", "RemoteRuns"]

#: Time of a run that is reserved for the end of its sandbox and for the report: code that reaches the
#: deadline is stopped before, so that its caller gets its output.
_REPORT_SECONDS: Final = 2.0


class RemoteRuns:
    """Sends code to rounds workers."""

    def __init__(self, caller: MethodCaller, catalogue: CatalogueReader, settings: Settings) -> None:
        self._caller = caller
        self._catalogue = catalogue
        self._return_bytes = settings.sandbox.return_bytes
        self._default_seconds = settings.workers.call_timeout_seconds + settings.sandbox.wall_seconds

    async def have_worker(self) -> bool:
        """Whether a rounds worker is live.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        catalogue = await self._catalogue.read()
        return any(worker.is_live and worker.lane == Lane.ROUNDS for worker in catalogue.workers)

    async def run(
        self,
        code: str,
        *,
        run_id: str,
        chat: ChatInfo,
        user_id: str | None,
        wakes_agent: bool,
        timeout_seconds: float | None = None,
    ) -> CodeReport:
        """Run code on a rounds worker, once per run id; cancelling the wait stops the run.

        Args:
            run_id: also the id of its Celery task.
            timeout_seconds: from now to the end of the run; None means the time limit of a run and, for the
                wait for a free worker, that of a call.

        Raises:
            SandboxUnavailableError, SandboxError, BudgetExceededError: the code did not run.
            ArgumentError: the code is too long or not valid Unicode.
            The errors of ``MethodCaller.call``.
        """
        seconds = self._default_seconds if timeout_seconds is None else timeout_seconds
        invocation = CallScope(chat=chat, user_id=user_id, wakes_agent=wakes_agent).invocation(
            RUN_TASK,
            encode_arguments((code,), {}),
            call_id=run_id,
            deadline=shared_time() + timedelta(seconds=seconds),
        )
        envelope = await self._caller.call(invocation, lane=Lane.ROUNDS)
        return CodeReport.from_plain(decode_value(envelope.value or "", max_bytes=self._return_bytes))


class CodeTarget(CallTarget):
    """Runs code on a rounds worker."""

    subject = TaskSubject(name="run", plugin_key="nekro", lane=Lane.ROUNDS)
    is_claimed = True

    def __init__(self, runs: CodeRuns, publisher: EventPublisher, *, wall_seconds: float) -> None:
        """Create the target.

        Args:
            wall_seconds: time limit of a run; the deadline of its call may be earlier.
        """
        self._runs = runs
        self._publisher = publisher
        self._wall_seconds = wall_seconds

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run the code; the value is its ``CodeReport`` as JSON data."""
        (code,), _ = arguments
        left = invocation.remaining_seconds()
        output = LiveText(partial(self._publish, invocation))
        try:
            report = await self._runs.run(
                code,
                chat=chat_of(invocation),
                user_id=invocation.user_id,
                wakes_agent=invocation.wakes_agent,
                run_id=invocation.call_id,
                wall_seconds=min(self._wall_seconds, max(left - _REPORT_SECONDS, left / 2)),
                on_output=output.add,
            )
        finally:
            output.flush()
        return Outcome(type=self.subject.type, value=report.to_plain())

    def _publish(self, invocation: Invocation, data: dict[str, Any]) -> None:
        event = live_event(EventType.OUTPUT_CHUNK, data, call_id=invocation.call_id)
        self._publisher.live(invocation.chat_key, event)
