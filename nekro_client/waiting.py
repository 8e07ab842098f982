"""Waiting for the end of a turn: both clients share this logic."""

from __future__ import annotations

import time
from typing import Final

from nekro_client.errors import WaitTimeoutError
from nekro_client.models import Turn, TurnState

__all__ = ["TurnWait"]

_ENDED: Final = frozenset({TurnState.DONE, TurnState.FAILED, TurnState.CANCELLED})
#: First pause between two looks at a turn; a turn of one round takes longer.
_SHORTEST_SECONDS: Final = 0.1
#: Longest pause: the end of a long turn is seen this late at most.
_LONGEST_SECONDS: Final = 1.0


class TurnWait:
    """Decides when to look at a turn again."""

    def __init__(self, turn_id: str, *, timeout_seconds: float | None) -> None:
        """Begin to wait; None waits without end."""
        self._turn_id = turn_id
        self._timeout_seconds = timeout_seconds
        self._began = time.monotonic()
        self._pause = _SHORTEST_SECONDS

    def pause_after(self, turn: Turn) -> float | None:
        """Return the seconds until the next look; None if the turn has ended.

        Raises:
            WaitTimeoutError: the time is over.
        """
        if turn.state in _ENDED:
            return None
        self._pause, pause = min(self._pause * 1.5, _LONGEST_SECONDS), self._pause
        if self._timeout_seconds is None:
            return pause
        left = self._began + self._timeout_seconds - time.monotonic()
        if left <= 0:
            raise WaitTimeoutError(f"turn {self._turn_id} is {turn.state} after {self._timeout_seconds:g} s")
        return min(pause, left)
