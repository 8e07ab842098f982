"""Repeats the latest writes on a server that became the primary, because it may lack them.

Redis confirms a write before its replicas have it, and a replaced primary that continues confirms writes that
are lost when it is demoted. Results and acknowledgements can be repeated without harm, so each process
remembers its latest ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from loguru import logger
from redis import RedisError

from broker_config.primaries import Primary
from nekro_agent.durations import RETRY_SECONDS

__all__ = ["Repeats"]

#: How long a write is remembered. Sentinels demote a replaced primary some 10 s after it continued.
KEPT_SECONDS: Final = 20.0
#: Size of the writes that are remembered; older ones are forgotten.
KEPT_BYTES: Final = 16 << 20
#: What a remembered write takes in addition to its content.
ENTRY_BYTES: Final = 1 << 10

Write = TypeVar("Write")


class Repeats(Generic[Write]):
    """The latest writes of a process to one Redis; thread-safe."""

    def __init__(self, primary: Primary, write: Callable[[Sequence[Write]], object]) -> None:
        """Remember nothing yet.

        Args:
            write: writes to the present primary; called on a thread of its own. Its RedisError and OSError
                let it be called again.
        """
        self._primary, self._write = primary, write
        self._lock = threading.Lock()
        self._writes: deque[tuple[float, int, Write]] = deque()
        self._bytes = 0
        self._is_due = self._is_repeating = False
        primary.on_change(self._repeat_soon)

    @property
    def term(self) -> int:
        """The present term; read it before a write."""
        return self._primary.term

    def add(self, write: Write, *, size: int, term: int) -> None:
        """Remember a write that was confirmed.

        Args:
            size: in bytes.
            term: the term before the write.
        """
        now, size = time.monotonic(), size + ENTRY_BYTES
        with self._lock:
            self._writes.append((now, size, write))
            self._bytes += size
            while self._bytes > KEPT_BYTES or self._writes[0][0] < now - KEPT_SECONDS:
                self._bytes -= self._writes.popleft()[1]
                if not self._writes:
                    break
        if term != self._primary.term:  # the repetition may have missed it
            self._repeat_soon()

    def _repeat_soon(self) -> None:
        with self._lock:
            if not self._writes:
                return
            self._is_due = True
            if self._is_repeating:
                return
            self._is_repeating = True
        threading.Thread(target=self._repeat, name="nekro-repeats", daemon=True).start()

    def _repeat(self) -> None:
        began = time.monotonic()
        while True:
            with self._lock:
                if not self._is_due:
                    self._is_repeating = False
                    return
                self._is_due = False
                writes = [write for at, _, write in self._writes if at > began - KEPT_SECONDS]
            try:
                self._write(writes)
            except Exception as exc:  # every later repetition depends on this thread
                if not isinstance(exc, RedisError | OSError) or time.monotonic() > began + KEPT_SECONDS:
                    logger.bind(count=len(writes), error=repr(exc)).warning("writes_not_repeated")
                    continue
                self._is_due = True
                time.sleep(RETRY_SECONDS)
            else:
                logger.bind(count=len(writes)).info("writes_repeated")
