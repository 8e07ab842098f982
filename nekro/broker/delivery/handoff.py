"""Direct delivery: passes a message to an idle worker without its queue.

A message in a queue costs an idle worker two round trips: it is woken, and then it claims. Therefore a
worker with free capacity *offers* a slot in a sorted set beside the queue. A publisher to an empty queue
takes an offer, records the message as held and publishes it on the worker's channel, in the script that
would otherwise push it to the queue. Storing the result of a successful call acknowledges its delivery
and offers its slot again in the same script.

The guarantees are those of the queue: a message is held under a lease before it is read, messages are not
reordered, and a worker gets no more messages than it has capacity for. If a worker died or hung after its
offer, one message waits until its lease expires, which is short (``HANDOFF_SECONDS``) until the worker
renews it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

from broker_config.keys import Keys
from broker_config.settings import BrokerSettings
from nekro.broker.delivery.offers import HANDOFF_SECONDS, OFFER_SECONDS, OFFER_SLOT, SlotOffer
from nekro.broker.delivery.transport import held_keys, holder
from nekro.broker.redis.link import RedisLink
from nekro.broker.redis.subscription import Subscription

__all__ = ["Handoff"]

#: How soon a slot is offered again while the previous call still runs.
AGAIN_SECONDS: Final = 0.002


class Handoff:
    """A worker's offers of slots, and its subscription to what is sent for them; on one event loop.

    Only a worker that consumes a single queue offers, so that no slot is taken twice.
    """

    def __init__(
        self,
        channel: Any,
        *,
        settings: BrokerSettings,
        link: RedisLink,
        on_message: Callable[[bytes], None],
    ) -> None:
        """Subscribe to the worker's channel; nothing is offered yet.

        Args:
            channel: the ``ClaimChannel`` that receives the messages.
            link: the connection for offers.
            on_message: called with what a publisher sends for an offer (``offers.HAND``); it calls ``taken``.
        """
        prefix = channel.global_keyprefix
        self._channel, self._link = channel, link
        self._keys = Keys(prefix=prefix)
        self._subscription = Subscription(settings, settings.url, f"{prefix}handed:{uuid4().hex}", on_message)
        index, held = held_keys(channel)
        self._slot = {
            "channel": self._subscription.channel,
            "index": index,
            "held": held,
            "holder": holder(),
            "seconds": min(HANDOFF_SECONDS, float(channel.visibility_timeout)),
        }
        self._offer: SlotOffer | None = None
        self._is_closing = False
        self._again: asyncio.TimerHandle | None = None
        #: Whether the offer can be taken, or has been taken by a message that has not arrived yet.
        self.is_open = False
        #: Number of offers in flight on other connections than the link (``Ending``), and an event that is
        #: set while there are none.
        self._sent_elsewhere = 0
        self._have_arrived = asyncio.Event()
        self._have_arrived.set()
        self._listening = asyncio.get_running_loop().create_task(
            self._subscription.listen(), name="nekro-handoff"
        )

    def offer(self) -> None:
        """Offer a slot if there is one, or renew the offer."""
        slot = self._slot_for(1)
        if slot is not None:
            self.is_open = True
            # Sent immediately instead of in a task, so that a withdrawal cannot overtake it.
            sent = self._link.begin("EVAL", OFFER_SLOT, 1, slot.key, slot.text, OFFER_SECONDS)
            asyncio.ensure_future(sent).add_done_callback(_ignore_result)

    def next_offer(self) -> SlotOffer | None:
        """Return an offer of a slot that is about to become free; None if one is open or none can be made.

        The caller that sends it must call ``offer_arrived`` afterwards.
        """
        slot = None if self.is_open else self._slot_for(0)
        if slot is None:
            return None
        self.is_open = True
        self._sent_elsewhere += 1
        self._have_arrived.clear()
        self._plan_nothing()
        return slot

    def offer_arrived(self) -> None:
        """Record that Redis has the offer that ``next_offer`` returned, or never will."""
        self._sent_elsewhere -= 1
        if not self._sent_elsewhere:
            self._have_arrived.set()

    def taken(self) -> float:
        """Record that a message arrived for the offer; returns its maximum age in seconds."""
        self.is_open = False
        if self._again is None and not self._is_closing:
            # If the call ends sooner, storing its result offers the slot without a separate command.
            self._again = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._offer_again)
        return self._subscription.lag_seconds

    async def withdraw(self) -> None:
        """Withdraw the offer; when this returns, every delivered message has arrived.

        Raises:
            redis.RedisError, OSError: Redis does not answer; the offer expires.
        """
        await self._have_arrived.wait()  # an offer that arrives later would not be withdrawn
        if self.is_open and self._offer is not None:
            withdrawn = await self._link.execute("ZREM", self._offer.key, self._offer.text)
            if not withdrawn:
                await self._subscription.settle()
            self.is_open = False

    async def close(self) -> None:
        """Withdraw the offer and make no more.

        Raises:
            The errors of ``withdraw``.
        """
        self._is_closing = True
        self._plan_nothing()
        try:
            await self.withdraw()
        finally:
            self._listening.cancel()
            self._subscription.abort()

    def _slot_for(self, room: int) -> SlotOffer | None:
        """Return the offer of a slot; None if there is no free slot or the subscription is down.

        Args:
            room: minimum number of free slots.
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
            self._offer = SlotOffer(self._keys.offers(queue), json.dumps(self._slot | {"queue": queue}))
        return self._offer

    def _offer_again(self) -> None:
        self._again = None
        if not self.is_open:
            self.offer()

    def _plan_nothing(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None


def _ignore_result(sent: asyncio.Future[Any]) -> None:
    """Ignore the outcome of an offer: a lost offer delays no message, because the queue is used instead."""
    if not sent.cancelled():
        sent.exception()
