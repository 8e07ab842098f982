"""Undocumented names of Celery and kombu that modules elsewhere need, under names of ours.

Imports of the libraries are made in functions, because commands import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from celery.app.task import Context

__all__ = [
    "CALL_LOGGERS", "ERROR_MODULES", "MAILBOX_STEP", "POOL_STEP", "WORKER_MODULES", "delete_binding",
    "pickle_warning", "request_of",
]  # fmt: skip

#: Step of a worker's consumer: its mailbox for broadcasts listens.
MAILBOX_STEP: Final = "celery.worker.consumer.control:Control"
#: Step of a worker: its pool has started.
POOL_STEP: Final = "celery.worker.components:Pool"
#: Loggers that name each call; below WARNING also its arguments.
CALL_LOGGERS: Final = ("celery.worker.strategy", "celery.app.trace")
#: Modules of the errors that Celery itself stores as the result of a task.
ERROR_MODULES: Final = frozenset({"celery.exceptions", "billiard.exceptions", "celery.backends.base"})

#: Modules that a worker imports when it starts, by their names in Celery's settings.
WORKER_MODULES: Final = (
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.fixups.django",
    "celery.loaders.app",
    "celery.worker.autoscale",
    "celery.worker.consumer.delayed_delivery",
    "celery.worker.control",
    "celery.worker.strategy",
)


def pickle_warning() -> type[Warning]:
    """Return the class of Celery's warning about pickled messages, which our workers do not accept."""
    from celery.platforms import SecurityWarning

    found: type[Warning] = SecurityWarning
    return found


def request_of(call_id: str, method: str, reply_to: str | None) -> Context:
    """Return a task's request as a result backend reads it, for a call that no worker runs."""
    from celery.app.task import Context

    return Context(id=call_id, task=method, reply_to=reply_to, errbacks=None, chord=None, group=None)


def delete_binding(channel: Any, queue: str, exchange: str, routing_key: str, pattern: str) -> None:
    """Delete a queue and its binding; ``channel`` is one of kombu's channels of Redis."""
    channel._delete(queue, exchange, routing_key, pattern)
