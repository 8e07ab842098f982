"""Live events, and live text: pieces of a model's answer or of a program's output at a bounded rate.

Live text is not kept. Each event carries the offset of its text, so a reader notices what was dropped; the
whole text follows in a kept event. A text may also be repeated from its beginning, for readers that come
while it grows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from nekro_agent.durations import FRESH_SECONDS, REFRESH_SECONDS
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
        self,
        publish: Callable[[dict[str, Any]], object],
        *,
        seconds: float = REFRESH_SECONDS / 3,
        repeats: bool = False,
    ) -> None:
        """Create it.

        Args:
            publish: receives ``{"offset", "text"}`` and what ``begin`` was given; must not block.
            seconds: least time between two events.
            repeats: publish the whole text every ``FRESH_SECONDS`` while it grows and fits into one event.
        """
        self._publish = publish
        self._seconds = seconds
        self._fields: Mapping[str, Any] = {}
        self._pieces: list[str] = []
        self._chars = 0
        self._offset = 0
        self._timer: asyncio.TimerHandle | None = None
        #: The whole text, if it is repeated, and when it is next.
        self._whole: list[str] | None = [] if repeats else None
        self._repeat_at = 0.0

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
        offset, text = self._offset, "".join(self._pieces)
        self._offset += self._chars
        if self._whole is not None:
            offset, text = self._repeated(offset, text, time.monotonic())
        self._publish({**self._fields, "offset": offset, "text": text})
        self._pieces.clear()
        self._chars = 0

    def _repeated(self, offset: int, text: str, now: float) -> tuple[int, str]:
        """Return the next event's offset and text: the whole text if it is time for it."""
        if self._offset > _MOST_CHARS or self._whole is None:
            self._whole = None
            return offset, text
        self._whole.append(text)
        if now < self._repeat_at:
            return offset, text
        self._repeat_at = now + FRESH_SECONDS
        return 0, "".join(self._whole)
