"""Runs of code on rounds workers, for processes that run none: sent as a task, which at most one worker runs.

A run has effects, so it is claimed by its id like a call: a second delivery never runs the code again. Its
output is published as live events of the chat that name the run as their call.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from nekro.app.chats.contexts import chat_of
from nekro.app.chats.live import LiveText, live_event
from nekro.app.chats.publisher import EventPublisher
from nekro.app.rounds.runs import CodeRuns
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments
from nekro_agent.execution.invoke import Outcome
from nekro_agent.methods import Lane
from storage.states import EventType
from workers.calls.handler import CallTarget, OnStep, TaskSubject

__all__ = ["CodeTarget"]

#: Time of a run that is reserved for the end of its sandbox and for the report: code that reaches the
#: deadline is stopped before, so that its caller gets its output.
_REPORT_SECONDS: Final = 2.0


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
