"""Live events, and live text: pieces of a model's answer or of a program's output at a bounded rate.

Live text is not kept. Each event carries the offset of its text, so a reader notices what was dropped; the
whole text follows in a kept event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.shared_clock import shared_time
from storage.states import EventType

__all__ = ["LiveText", "live_event"]

#: Characters of one event. A program that prints faster than this per interval is shown with gaps.
_MOST_CHARS: Final = 8_000


def live_event(kind: EventType, data: Mapping[str, Any], **ids: str | None) -> dict[str, Any]:
    """Return an event for ``EventPublisher.live``.

    Args:
        ids: ``turn_id``, ``round_id`` and ``call_id``, as far as it has them.
    """
    return {"type": kind.value, "at": shared_time().isoformat(), **ids, "data": data}


class LiveText:
    """One growing text; used on one event loop."""

    def __init__(
        self, publish: Callable[[dict[str, Any]], object], *, seconds: float = REFRESH_SECONDS / 3
    ) -> None:
        """Create it.

        Args:
            publish: receives ``{"offset", "text"}`` and what ``begin`` was given; must not block.
            seconds: least time between two events.
        """
        self._publish = publish
        self._seconds = seconds
        self._fields: Mapping[str, Any] = {}
        self._pieces: list[str] = []
        self._chars = 0
        self._offset = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, fields: Mapping[str, Any]) -> None:
        """Begin another text, whose events carry these fields."""
        self.flush()
        self._fields, self._offset = fields, 0

    def add(self, text: str) -> None:
        """Append a piece: published at once, or with others when the least time is over."""
        if self._chars < _MOST_CHARS:
            self._pieces.append(text[: _MOST_CHARS - self._chars])
        self._chars += len(text)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)
            self._send()

    def flush(self) -> None:
        """Publish what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send()

    def _due(self) -> None:
        self._timer = None
        if self._chars:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)
            self._send()

    def _send(self) -> None:
        if not self._chars:
            return
        self._publish({**self._fields, "offset": self._offset, "text": "".join(self._pieces)})
        self._offset += self._chars
        self._pieces.clear()
        self._chars = 0
