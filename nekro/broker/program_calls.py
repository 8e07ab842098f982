"""Calls of programs that may be run again: what Redis knows of them.

A program that is run again makes the calls that it made before with the same ids
(``nekro.app.calls.journal``). Beside the message of each call of a program, the broker keeps a mark: a field
of one hash per program. A call with a mark is not published again: it runs, waits, or has its result under
its key. So a call that has no row runs once for its program, too, without a transaction. The mark and the
message are written by one script, so a server that lost the one has lost the other.

A mark also has the call's *note*: what the program read before it (``StubCall.readings``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from nekro.broker.redis.link import Script
from nekro.broker.redis.losses import Place

__all__ = ["MARK", "MARKED", "MARKS_SECONDS", "Marked", "ProgramCall", "Sent"]

#: How long marks are kept after the last call of their program: as long as results.
MARKS_SECONDS: Final = 3600

#: Lua functions ``marked(key, id)``, which returns the place of a call that has a mark, or nil, and
#: ``mark(key, id, word, number, note, seconds)``. ``key`` is the hash of a program, ``id`` "" for others.
MARKED: Final = """
local function marked(key, id)
    local mark = id ~= '' and redis.call('HGET', key, id)
    if not mark then return nil end
    local word, number = string.match(mark, '^([^|]*)|(%d+)|')
    return {word, tonumber(number), 1}
end
local function mark(key, id, word, number, note, seconds)
    if id == '' then return end
    redis.call('HSET', key, id, word .. '|' .. number .. '|' .. note)
    redis.call('EXPIRE', key, seconds)
end
"""

#: Marks a call whose message another broker has. KEYS: the hash of its program. ARGV: id, note, seconds.
#: Returns 1 if it has a mark already, else 0.
MARK: Final = Script(f"""{MARKED}
if marked(KEYS[1], ARGV[1]) then return 1 end
mark(KEYS[1], ARGV[1], '', 0, ARGV[2], ARGV[3])
return 0
""")


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A call of a program."""

    #: Names the hash of its program.
    program_id: str
    call_id: str
    #: Kept with its mark.
    note: str = ""


class Sent(NamedTuple):
    """What publishing a message did."""

    #: Where it is; None: the broker does not say.
    place: Place | None
    #: Whether it was not published, because the call has a mark.
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """The mark of a call."""

    note: str

    @classmethod
    def read(cls, mark: bytes) -> Self:
        """Read a field of the hash."""
        return cls(mark.decode().split("|", 2)[2])
