"""Which published messages a Redis still has, when it restarted or another server took its place.

A Redis that comes back may have all of its data, none, or all but the last second of it (the append-only
file is flushed once a second; a promoted replica lags). So each message has a number, counted in Redis
itself, and each run of a server begins an epoch that records the highest number it still knew. What was
published before with a higher number is lost.

The run is identified by the server's ``run_id``, which is new at each start and differs between a primary
and its replicas. Where ``INFO`` is not permitted it is empty, and only the loss of all data is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from broker_config.redis_link import Script

__all__ = ["EPOCH", "LOOK", "Epoch", "Place"]

#: Lua function ``epoch(key, run, word)``: begins an epoch called ``word`` if the server's run is new, and
#: returns {word, word of the epoch before, highest number that was kept of it, …}.
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

#: Script that returns the epoch. KEYS: epoch (hash). ARGV: word unlike any other, run id of the server.
LOOK: Final = Script(f"{EPOCH}\nreturn epoch(KEYS[1], ARGV[2], ARGV[1])\n")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message was published: the epoch's word and the message's number."""

    word: str
    number: int


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the broker's data says of itself now."""

    word: str
    #: Word of the epoch before; "" when the data knows of none.
    before: str
    #: Highest number that was kept of it.
    kept: int

    @classmethod
    def of_reply(cls, reply: list[bytes]) -> Self:
        """Read what ``LOOK`` returned."""
        word, before, kept = reply[:3]
        return cls(word.decode(), before.decode(), int(kept))

    def has(self, place: Place) -> bool:
        """Whether a message published there was not lost with data of the broker since.

        A message from two or more epochs ago counts as lost: nothing records what those kept.
        """
        return place.word == self.word or (place.word == self.before and place.number <= self.kept)

    def moved(self, place: Place) -> Place:
        """Return the place of a message that this epoch has, as a place of this epoch."""
        return Place(self.word, place.number)
