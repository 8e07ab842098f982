"""A selector that tells whether its event loop sleeps."""

from __future__ import annotations

import selectors
from typing import Any


class CountingSelector(selectors.DefaultSelector):
    """Counts how often its loop slept."""

    sleeps = 0

    def select(self, timeout: float | None = None) -> Any:
        """Wait as any selector does."""
        self.sleeps += timeout is None or timeout > 0
        return super().select(timeout)
