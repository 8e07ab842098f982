"""What Celery knows about the worker of this process, what can be asked of its consumer, and its task events.

All of it is private API. Celery publishes events on the thread that sends the 24th of them, which in the
asyncio pool is the event loop. Here events are buffered and the worker's hub publishes them together.
Without a watcher no task events are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final

from celery import signals
from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher
from celery.platforms import EX_FAILURE
from celery.worker import state

from nekro_agent.tools.visible_text import visible_text

__all__ = [
    "BufferingDispatcher",
    "BufferingEvents",
    "add_revoked",
    "allow_repeated_stop_signals",
    "consume_queue",
    "is_revoked",
    "is_stopping",
    "serve_new_tasks",
    "was_interrupted",
    "why_it_consumes_nothing",
]


def allow_repeated_stop_signals() -> None:
    """Let a second signal to stop interrupt Celery's handler of the first one.

    The handler sends ``worker_shutting_down`` under a lock that is not reentrant. A process that gets the
    second signal in that moment would wait for itself forever.
    """
    signals.worker_shutting_down.lock = threading.RLock()


def is_stopping() -> bool:
    """Whether the worker of this process shuts down."""
    return state.should_stop is not None or state.should_terminate is not None


def was_interrupted() -> bool:
    """Whether Ctrl-C stopped the worker gracefully; Celery reports that as a failure, unlike SIGTERM."""
    return bool(state.should_stop == EX_FAILURE and not state.should_terminate)


def is_revoked(task_id: str) -> bool:
    """Whether a task was revoked, as far as this worker knows."""
    return task_id in state.revoked


def add_revoked(task_ids: Iterable[str]) -> None:
    """Let the worker of this process drop these tasks."""
    for task_id in task_ids:
        state.revoked.add(task_id)


def consume_queue(worker: Any, queue: str) -> None:
    """Serve one more queue, also after reconnects; executed by the hub once it runs."""
    worker.consumer.call_soon(worker.consumer.add_task_queue, queue)


def serve_new_tasks(worker: Any) -> None:
    """Accept messages of tasks that were registered after the worker started; executed by the hub."""
    worker.consumer.call_soon(worker.consumer.update_strategies)


def why_it_consumes_nothing(worker: Any) -> str | None:
    """Return why a worker takes no messages at present; None when it takes them."""
    if is_stopping():
        return "the worker is stopping"
    consumer = worker.consumer
    if consumer is None or consumer.connection is None or consumer.task_consumer is None:
        return "the worker has no connection to its broker"
    return None


#: Maximum number of buffered events while the broker accepts none; more are dropped.
MAX_BUFFERED: Final = 20_000


class BufferingDispatcher(EventDispatcher):  # type: ignore[misc]
    """Publishes task events only when its owner calls ``flush``."""

    #: Whether a queue receives events; updated by the owner if it can be determined.
    is_watched = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_limit = float("inf")

    def send(self, type: str, *args: Any, **fields: Any) -> Any:
        """Send or buffer an event; task events are dropped while events are not watched."""
        if not self.is_watched and type.startswith("task-"):
            return None
        if sum(map(len, self._group_buffer.values())) >= MAX_BUFFERED:
            return None
        return super().send(type, *args, **_visible(fields))


def _visible(fields: dict[str, Any]) -> dict[str, Any]:
    """Escape the strings of an event, because `celery events`, Flower and other tools show them."""
    return {name: visible_text(value) if isinstance(value, str) else value for name, value in fields.items()}


class BufferingEvents(Events):  # type: ignore[misc]
    """``app.events`` with ``BufferingDispatcher``."""

    dispatcher_cls = "nekro.broker.celery.worker:BufferingDispatcher"
