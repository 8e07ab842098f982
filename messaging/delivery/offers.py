"""Lua scripts that make and take offers of direct delivery (``messaging.delivery.handoff``).

An offer is a member of a sorted set beside the queue; its score is its expiry by the clock of Redis. The
script that stores a result also ends its delivery (``Ending``): it acknowledges it and offers its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["HAND", "HANDOFF_SECONDS", "OFFER", "OFFER_PLACE", "OFFER_SECONDS", "Ack", "Ending", "PlaceOffer"]

#: First lease of a directly delivered message, until its worker renews it with the usual duration.
HANDOFF_SECONDS: Final = 5.0
#: Lifetime of an offer; an idle worker renews it about once a second.
OFFER_SECONDS: Final = 2.0

#: Lua function that offers a place: ``offer(offers, place, seconds)``.
OFFER: Final = """
local function offer(offers, place, seconds)
    local time = redis.call('TIME')
    redis.call('ZADD', offers, time[1] + time[2] / 1000000 + seconds, place)
    redis.call('EXPIRE', offers, 60)
end
"""

#: Script that calls ``offer``. KEYS: offers. ARGV: offer, seconds.
OFFER_PLACE: Final = f"{OFFER}\noffer(KEYS[1], ARGV[1], ARGV[2])\nreturn 1\n"

#: Lua function ``hand(offers, tag, message)``: publishes a message to the worker of the newest offer and
#: records it as held, as a claim does. Returns whether a worker got it.
HAND: Final = """
local function hand(offers, tag, message)
    local time = redis.call('TIME')
    local now = time[1] + time[2] / 1000000
    while true do
        local newest = redis.call('ZPOPMAX', offers)
        if not newest[1] then return false end
        if tonumber(newest[2]) < now then
            redis.call('DEL', offers)
            return false
        end
        local place = cjson.decode(newest[1])
        -- ``holder`` is missing in offers of workers of earlier releases.
        local held = (place.holder or '') .. tag
        local text = held .. '\\n' .. place.queue .. '\\n' .. message
        local readers = redis.pcall('PUBLISH', place.channel, text)
        if type(readers) == 'number' and readers > 0 then
            redis.call('ZADD', place.index, now + place.seconds, held)
            local queue = cjson.encode(place.queue)
            redis.call('HSET', place.held, held, '[' .. message .. ', "", ' .. queue .. ']')
            return true
        end
    end
end
"""


@dataclass(frozen=True, slots=True)
class PlaceOffer:
    """A place for one message of one queue."""

    #: Sorted set of the queue's offers.
    key: str
    #: JSON of ``channel`` (the worker's), ``queue``, ``index`` and ``held`` (keys under which a held
    #: message is recorded, see ``messaging.delivery.transport.CLAIM``), ``seconds`` (its first lease),
    #: ``holder`` (the beginning of its tag).
    text: str


#: What acknowledges a delivery: key of the index, key of the held messages, tag.
Ack = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a delivery, as part of the script that stores its result."""

    ack: Ack
    #: None: do not offer the place.
    offer: PlaceOffer | None
    #: Call it once with whether the result was stored; if not, Celery acknowledges the delivery.
    end: Callable[[bool], None]
