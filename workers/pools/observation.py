"""Logs, metrics and spans of each task, whatever it runs and however it ends.

They are recorded on Celery's signals, which enclose the body, the storing of its result and
Celery's log of its failure. In between, every log record of the task carries its call, method,
chat and round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from celery import signals, states
from loguru import logger

from broker_config.topology import DRAIN_TASK, JOB_TASK
from nekro.base.metrics import is_counting, metrics
from nekro.broker.tracing import span
from nekro_agent.core.logger import begin_fields, end_fields
from nekro_agent.errors import MethodFailedError, NekroError
from nekro_agent.shared_clock import shared_now
from workers.pools.jobs import current_job

__all__ = ["TaskObservation", "begin_observation", "is_only_observer", "observe_tasks", "outcome_of"]

_KEY: Final = "nekro_observation"
#: Fields of an ``Invocation`` that logs show, taken from the message before its signature is checked:
#: the log of a refused, forged message shows them too.
_FIELDS: Final = ("chat_key", "round_id")
_LONGEST_FIELD: Final = 200
#: Outcomes that do not mark the span as failed; a duplicate runs elsewhere.
_GOOD: Final = ("ok", "duplicate")


class TaskObservation:
    """The observation of one task, from before its body until its result is stored."""

    __slots__ = ("_begin", "_fields", "_is_round", "_name", "_span")

    def __init__(
        self, name: str, fields: dict[str, str], issued_at: datetime | None, *, headers: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._is_round = name == DRAIN_TASK
        self._fields = begin_fields(fields)
        has_own = name in (DRAIN_TASK, JOB_TASK)  # spans, in the traces of their turns
        self._span = None if has_own else span(f"run {name}", fields, kind="consumer", headers=headers)
        if self._span is not None:
            self._span.__enter__()
        self._begin = time.monotonic()
        metrics().calls_in_flight.inc()
        if issued_at is not None:
            waited = shared_now() - issued_at.timestamp()
            metrics().call_wait_seconds.observe(max(0.0, waited))

    def end(self, outcome: str) -> None:
        """Count, log and trace the end."""
        seconds = time.monotonic() - self._begin
        metrics().calls_in_flight.dec()
        if not self._is_round:  # the task only checks a chat; its rounds are counted and logged separately
            metrics().calls.labels(self._name, outcome).inc()
            metrics().call_seconds.labels(self._name).observe(seconds)
            logger.bind(outcome=outcome, seconds=round(seconds, 6)).info("call_ended")
        if self._span is not None:
            self._span.set_attributes(outcome=outcome)
            if outcome not in _GOOD:
                self._span.fail(outcome)
            self._span.__exit__(None, None, None)
        with contextlib.suppress(ValueError):  # an abandoned task ends in another context
            end_fields(self._fields)


@contextlib.contextmanager
def observe_tasks() -> Iterator[None]:
    """Observe every task that this process runs while the block lasts."""
    signals.task_prerun.connect(_begin, weak=False)
    signals.task_postrun.connect(_end, weak=False)
    try:
        yield
    finally:
        signals.task_prerun.disconnect(_begin)
        signals.task_postrun.disconnect(_end)


def outcome_of(state: str | None, result: object) -> str:
    """Name how a task ended: ok, duplicate, stopped, or its error's code (``method_failed``: a plugin's)."""
    if state == states.SUCCESS:
        return "ok"
    if state == states.IGNORED:
        return "duplicate" if type(result).__name__ == "Ignore" else "stopped"
    return result.code if isinstance(result, NekroError) else MethodFailedError.code


def begin_observation(name: str, task_id: str, args: Any, headers: Mapping[str, Any]) -> TaskObservation:
    """Start observing a task.

    Args:
        args: arguments of its message.
        headers: headers of its message; a trace in them is continued.
    """
    claimed = _claimed(args)
    fields = {"call_id": task_id, "method": name}
    if name in (DRAIN_TASK, JOB_TASK):
        fields = {"task_id": task_id}
    for field in _FIELDS:
        value = claimed.get(field)
        if isinstance(value, str):
            fields[field] = value[:_LONGEST_FIELD]
    return TaskObservation(name, fields, _issued_at(claimed) if is_counting() else None, headers=headers)


def is_only_observer() -> bool:
    """Whether ``observe_tasks`` is the only receiver of the start and end of tasks."""
    return len(signals.task_prerun.receivers) <= 1 and len(signals.task_postrun.receivers) <= 1


def _begin(sender: Any, task_id: str, args: Any, **_: Any) -> None:
    job = current_job()
    observation = None if job is None else job.observation
    if observation is None:
        # Celery stores a message's own headers beside its fields.
        observation = begin_observation(sender.name, task_id, args, vars(sender.request))
    setattr(sender.request, _KEY, observation)


def _end(sender: Any, retval: object, state: str | None, **_: Any) -> None:
    observation: TaskObservation | None = getattr(sender.request, _KEY, None)
    if observation is not None:
        observation.end(outcome_of(state, retval))


def _claimed(args: Any) -> dict[str, Any]:
    body = args[0] if args else None
    invocation = body.get("invocation") if isinstance(body, dict) else None
    return invocation if isinstance(invocation, dict) else {}


def _issued_at(claimed: dict[str, Any]) -> datetime | None:
    try:
        moment = datetime.fromisoformat(claimed["issued_at"])
    except (KeyError, TypeError, ValueError):
        return None
    return moment if moment.tzinfo is not None else None
