"""Lua scripts that make and take offers of direct delivery (``nekro.broker.delivery.handoff``).

An offer is a member of a sorted set beside the queue; its score is its expiry by the clock of Redis. The
script that stores a result also ends its delivery (``Ending``): it acknowledges it and offers its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["HAND", "HANDOFF_SECONDS", "OFFER", "OFFER_SECONDS", "OFFER_SLOT", "Ack", "Ending", "SlotOffer"]

#: First lease of a directly delivered message, until its worker renews it with the usual duration.
HANDOFF_SECONDS: Final = 5.0
#: Lifetime of an offer; an idle worker renews it about once a second.
OFFER_SECONDS: Final = 2.0

#: Lua function that offers a slot: ``offer(offers, slot, seconds)``.
OFFER: Final = """
local function offer(offers, slot, seconds)
    local time = redis.call('TIME')
    redis.call('ZADD', offers, time[1] + time[2] / 1000000 + seconds, slot)
    redis.call('EXPIRE', offers, 60)
end
"""

#: Script that calls ``offer``. KEYS: offers. ARGV: offer, seconds.
OFFER_SLOT: Final = f"{OFFER}\noffer(KEYS[1], ARGV[1], ARGV[2])\nreturn 1\n"

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
        local slot = cjson.decode(newest[1])
        -- ``holder`` is missing in offers of workers of earlier releases.
        local held = (slot.holder or '') .. tag
        local text = held .. '\\n' .. slot.queue .. '\\n' .. message
        local readers = redis.pcall('PUBLISH', slot.channel, text)
        if type(readers) == 'number' and readers > 0 then
            redis.call('ZADD', slot.index, now + slot.seconds, held)
            local queue = cjson.encode(slot.queue)
            redis.call('HSET', slot.held, held, '[' .. message .. ', "", ' .. queue .. ']')
            return true
        end
    end
end
"""


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """A slot for one message of one queue."""

    #: Sorted set of the queue's offers.
    key: str
    #: JSON of ``channel`` (the worker's), ``queue``, ``index`` and ``held`` (keys that record a held
    #: message, see ``nekro.broker.delivery.transport.CLAIM``), ``seconds`` (its first lease),
    #: ``holder`` (the beginning of its tag).
    text: str


#: What acknowledges a delivery: key of the index, key of the held messages, tag.
Ack = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a delivery, as part of the script that stores its result."""

    ack: Ack
    #: None: do not offer the slot.
    offer: SlotOffer | None
    #: Call it once with whether the result was stored; if not, Celery acknowledges the delivery.
    end: Callable[[bool], None]
