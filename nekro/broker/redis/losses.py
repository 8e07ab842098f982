"""What Redis lost after a restart or a failover: detected for messages, repeated for the latest writes.

A restarted Redis may have all of its data, none, or all but the last second (the append-only file is
flushed once a second; a promoted replica lags). So each message has a number, counted in Redis itself, and
each run of a server begins an epoch that records the highest number in its data. Messages of the previous
epoch with a higher number are lost. A run is identified by the server's ``run_id``, which is new at each
start and differs between a primary and its replicas. If ``INFO`` is not permitted it is empty, and only the
loss of all data is detected.

Redis confirms a write before its replicas have it, and a replaced primary that continues confirms writes
that are lost when it is demoted. Results and acknowledgements can be repeated without harm, so each process
remembers its latest ones, and repeats them on a server that became the primary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from loguru import logger

from broker_config.primaries import Primary
from broker_config.redis_library import redis
from nekro.broker.redis.link import Script
from nekro_agent.durations import RETRY_SECONDS

__all__ = [
    "EPOCH",
    "LOOK",
    "Epoch",
    "Place",
    "Repeats",
]

#: Lua function ``epoch(key, run, word)``: begins an epoch named ``word`` if the server's run is new, and
#: returns {name of the epoch, name of the previous epoch, highest number of it that was kept, …}.
#: ``key`` is a hash with the fields word, run, before, kept and last.
EPOCH: Final = """
local function epoch(key, run, word)
    local now = redis.call('HMGET', key, 'word', 'before', 'kept', 'last', 'run')
    if now[1] and (now[5] == run or run == '') then return now end
    local last = now[4] or '0'
    redis.call('HSET', key, 'word', word, 'before', now[1] or '', 'kept', last, 'last', last, 'run', run)
    return {word, now[1] or '', last, last}
end
"""

#: Script that returns the epoch. KEYS: epoch (hash). ARGV: unique name, run id of the server.
LOOK: Final = Script(f"{EPOCH}\nreturn epoch(KEYS[1], ARGV[2], ARGV[1])\n")


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a published message: the epoch's name and the message's number."""

    word: str
    number: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """The present epoch of the broker's data."""

    word: str
    #: Name of the previous epoch; "" if there was none.
    before: str
    #: Highest number of the previous epoch that was kept.
    kept: int

    @classmethod
    def of_reply(cls, reply: list[bytes]) -> Self:
        """Parse the reply of ``LOOK``."""
        word, before, kept = reply[:3]
        return cls(word.decode(), before.decode(), int(kept))

    def has(self, place: Place) -> bool:
        """Whether the broker still has the message that was published at ``place``.

        A message from two or more epochs ago counts as lost, because only the previous epoch is recorded.
        """
        return place.word == self.word or (place.word == self.before and place.number <= self.kept)

    def moved(self, place: Place) -> Place:
        """Return the place in this epoch of a message that this epoch has."""
        return Place(self.word, place.number)


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
                if not isinstance(exc, redis.RedisError | OSError) or time.monotonic() > began + KEPT_SECONDS:
                    logger.bind(count=len(writes), error=repr(exc)).warning("writes_not_repeated")
                    continue
                self._is_due = True
                time.sleep(RETRY_SECONDS)
            else:
                logger.bind(count=len(writes)).info("writes_repeated")
