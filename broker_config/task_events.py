"""Task events that cost their worker next to nothing.

Celery publishes events from whatever thread the 24th of them is sent on, in the asyncio pool
the event loop itself. Here events gather and the worker's hub publishes them a few times a
second; whoever watches sees them that much later. While nobody watches there are none.
"""

from __future__ import annotations

from typing import Any, Final

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

from nekro_agent.tools.visible_text import visible_text

__all__ = ["EVENT_SECONDS", "WATCH_SECONDS", "BufferingDispatcher", "BufferingEvents"]

#: Pause between two publications.
EVENT_SECONDS: Final = 0.1
#: How often a worker looks whether anybody watches.
WATCH_SECONDS: Final = 1.0
#: Events kept while the broker takes none; more are dropped, they are for watching only.
MAX_BUFFERED: Final = 20_000


class BufferingDispatcher(EventDispatcher):  # type: ignore[misc]
    """Publishes task events when its owner calls ``flush`` and at no other time."""

    #: Whether any queue receives events; the owner keeps it up to date where it can tell.
    is_watched = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_limit = float("inf")

    def send(self, type: str, *args: Any, **fields: Any) -> Any:
        """Send or buffer an event; one of a task is dropped while nobody watches."""
        if not self.is_watched and type.startswith("task-"):
            return None
        if sum(map(len, self._group_buffer.values())) >= MAX_BUFFERED:
            return None
        return super().send(type, *args, **_visible(fields))


def _visible(fields: dict[str, Any]) -> dict[str, Any]:
    """Escape texts of an event: who watches shows them, `celery events` and Flower among them."""
    return {name: visible_text(value) if isinstance(value, str) else value for name, value in fields.items()}


class BufferingEvents(Events):  # type: ignore[misc]
    """``app.events`` with the dispatcher above."""

    dispatcher_cls = "broker_config.task_events:BufferingDispatcher"
