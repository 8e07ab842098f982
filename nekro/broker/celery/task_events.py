"""Task events with little overhead for their worker.

Celery publishes events on the thread that sends the 24th of them, which in the asyncio pool is the
event loop. Here events are buffered and the worker's hub publishes them together.
Without a watcher no task events are sent.
"""

from __future__ import annotations

from typing import Any, Final

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

from nekro_agent.tools.visible_text import visible_text

__all__ = ["BufferingDispatcher", "BufferingEvents"]

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

    dispatcher_cls = "nekro.broker.celery.task_events:BufferingDispatcher"
