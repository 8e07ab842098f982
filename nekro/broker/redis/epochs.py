"""Detects which published messages Redis has lost after a restart or a failover.

A restarted Redis may have all of its data, none, or all but the last second (the append-only file is
flushed once a second; a promoted replica lags). So each message has a number, counted in Redis itself,
and each run of a server begins an epoch that records the highest number in its data. Messages of the
previous epoch with a higher number are lost.

A run is identified by the server's ``run_id``, which is new at each start and differs between a primary
and its replicas. If ``INFO`` is not permitted it is empty, and only the loss of all data is detected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from nekro.broker.redis.link import Script

__all__ = ["EPOCH", "LOOK", "Epoch", "Place"]

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
