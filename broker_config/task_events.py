"""Task events that cost their worker next to nothing.

Celery publishes events from whatever thread the 24th of them is sent on, in the asyncio pool
the event loop itself. Here events gather and the worker's hub publishes them a few times a
second; whoever watches sees them that much later.
"""

from __future__ import annotations

from typing import Any, Final

from celery.app.events import Events
from celery.events.dispatcher import EventDispatcher

__all__ = ["EVENT_SECONDS", "BufferingDispatcher", "BufferingEvents"]

#: Pause between two publications.
EVENT_SECONDS: Final = 0.1
#: Events kept while the broker takes none; more are dropped, they are for watching only.
MAX_BUFFERED: Final = 20_000


class BufferingDispatcher(EventDispatcher):  # type: ignore[misc]
    """Publishes task events when its owner calls ``flush`` and at no other time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer_limit = float("inf")

    def send(self, type: str, *args: Any, **fields: Any) -> Any:
        """Send or buffer an event."""
        if sum(map(len, self._group_buffer.values())) >= MAX_BUFFERED:
            return None
        return super().send(type, *args, **fields)


class BufferingEvents(Events):  # type: ignore[misc]
    """``app.events`` with the dispatcher above."""

    dispatcher_cls = "broker_config.task_events:BufferingDispatcher"
