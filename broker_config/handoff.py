"""Handing a message straight to a worker that waits for one.

A message that goes through its queue costs a waiting worker two exchanges: it is woken, and then it
claims. So a worker with room *offers* a place, in a sorted set beside the queue. Whoever publishes to
an empty queue takes an offer, writes the message down as held and publishes it on the channel of the
worker, all in the script that would have put it on the queue. What is stored for a call that succeeds
acknowledges its delivery and offers its place again in the same step.

Promises stay what they are: a message is held under a lease before anybody reads it, an older message
is never overtaken, and a worker is handed no more than it has room for. Of a worker that died or froze
since its offer, one message waits for its lease, which is short (``HANDOFF_SECONDS``) until the worker
renews it. ``NEKRO_BROKER__HANDOFF=false`` sends everything through the queues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from broker_config.keys import Keys
from broker_config.leases import Ack, LeaseKeeper
from broker_config.offers import HANDOFF_SECONDS, OFFER_PLACE, OFFER_SECONDS, PlaceOffer
from broker_config.redis_link import RedisLink
from broker_config.settings import BrokerSettings
from broker_config.subscription import Subscription
from broker_config.transport import held_keys

__all__ = ["Ending", "Handoff"]

#: How soon a place is offered again while the call before still runs.
AGAIN_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class Ending:
    """What the script that stores a result does besides: acknowledge its delivery, offer its place."""

    ack: Ack
    #: None: its place is not for others.
    offer: PlaceOffer | None
    keeper: LeaseKeeper
    handoff: Handoff

    def end(self, *, is_stored: bool) -> None:
        """Say how it went; what was not stored is acknowledged in the ordinary way."""
        self.keeper.ended(self.ack, is_done=is_stored)
        if self.offer is not None:
            self.handoff.offer_arrived()


class Handoff:
    """A worker's side: offers its places and passes on what is handed to it, on one event loop.

    Only a worker that consumes one queue offers: its places are not to be taken twice.
    """

    def __init__(
        self,
        channel: Any,
        *,
        settings: BrokerSettings,
        link: RedisLink,
        take: Callable[[str, str, bytes, float], None],
    ) -> None:
        """Take how to work.

        Args:
            channel: the ``ClaimChannel`` whose messages are taken.
            link: carries the offers.
            take: told a queue, a tag, a message that is held under it, and its greatest possible age in
                seconds.
        """
        prefix = channel.global_keyprefix
        self._channel, self._link, self._take = channel, link, take
        self._keys = Keys(prefix=prefix)
        self._subscription = Subscription(
            settings, settings.url, f"{prefix}handed:{uuid4().hex}", self._on_message
        )
        index, held = held_keys(channel)
        self._place = {
            "channel": self._subscription.channel,
            "index": index,
            "held": held,
            "seconds": min(HANDOFF_SECONDS, float(channel.visibility_timeout)),
        }
        self._offer: PlaceOffer | None = None
        self._is_closing = False
        self._again: asyncio.TimerHandle | None = None
        #: Whether somebody may take the offer, or has taken it and his message is on its way.
        self.is_open = False
        #: Offers on their way on other connections than the link (``Ending``), and whether there are none.
        self._sent_elsewhere = 0
        self._have_arrived = asyncio.Event()
        self._have_arrived.set()
        self._listening = asyncio.get_running_loop().create_task(
            self._subscription.listen(), name="nekro-handoff"
        )

    def offer(self) -> None:
        """Offer a place if there is one, or renew the offer."""
        place = self._place_for(1)
        if place is not None:
            self.is_open = True
            # Sent at once and not by a task: a withdrawal must not overtake it.
            sent = self._link.begin("EVAL", OFFER_PLACE, 1, place.key, place.text, OFFER_SECONDS)
            asyncio.ensure_future(sent).add_done_callback(_look_away)

    def next_offer(self) -> PlaceOffer | None:
        """The offer of a place that is about to be left; None if one stands, or none can be made.

        Whoever sends it tells how that ended (``offer_arrived``).
        """
        place = None if self.is_open else self._place_for(0)
        if place is None:
            return None
        self.is_open = True
        self._sent_elsewhere += 1
        self._have_arrived.clear()
        self._plan_nothing()
        return place

    def offer_arrived(self) -> None:
        """Know that Redis has what ``next_offer`` returned, or never will."""
        self._sent_elsewhere -= 1
        if not self._sent_elsewhere:
            self._have_arrived.set()

    async def withdraw(self) -> None:
        """Take the offer back; when this returns, what was handed over has been passed on.

        Raises:
            redis.RedisError, OSError: Redis does not answer; the offer ends by itself.
        """
        await self._have_arrived.wait()  # an offer that comes later would stand
        if self.is_open and self._offer is not None:
            withdrawn = await self._link.execute("ZREM", self._offer.key, self._offer.text)
            if not withdrawn:
                await self._subscription.settle()
            self.is_open = False

    async def close(self) -> None:
        """Offer nothing any more.

        Raises:
            As ``withdraw``.
        """
        self._is_closing = True
        self._plan_nothing()
        try:
            await self.withdraw()
        finally:
            self._listening.cancel()
            self._subscription.abort()

    def _place_for(self, room: int) -> PlaceOffer | None:
        """The offer of a place for one queue's messages; None if there is none, or nobody would be heard.

        Args:
            room: least number of places that must be free.
        """
        queues = self._channel.active_queues
        if (
            self._is_closing
            or len(queues) != 1
            or (room and self._channel.room() < room)
            or not self._subscription.stands
        ):
            return None
        (queue,) = queues
        if self._offer is None or self._offer.key != self._keys.offers(queue):
            self._offer = PlaceOffer(self._keys.offers(queue), json.dumps(self._place | {"queue": queue}))
        return self._offer

    def _on_message(self, text: bytes) -> None:
        tag, queue, message = text.split(b"\n", 2)
        self.is_open = False
        self._take(queue.decode(), tag.decode(), message, self._subscription.lag_seconds)
        if self._again is None and not self._is_closing:
            # Its end, if that comes sooner, offers the place without a command for it.
            self._again = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._offer_again)

    def _offer_again(self) -> None:
        self._again = None
        if not self.is_open:
            self.offer()

    def _plan_nothing(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None


def _look_away(sent: asyncio.Future[Any]) -> None:
    """Whether it arrived is seen by what is handed over."""
    if not sent.cancelled():
        sent.exception()
