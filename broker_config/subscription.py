"""What is published on one channel of Redis, as it comes.

A subscriber is given messages without asking for each, which spares both sides an exchange and
Redis a list. Nothing is kept for one that is away: whoever publishes learns how many there are, and
takes another way when there is none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, NoReturn

import redis

from broker_config.redis_link import RedisLink
from broker_config.settings import BrokerSettings

__all__ = ["MAX_PUBLISHED_BYTES", "Subscription"]

#: Longest text that is published. Redis cuts off a subscriber that is 32 MiB behind (its default limit).
MAX_PUBLISHED_BYTES: Final = 16 << 10
#: How often the subscription is proved to stand.
PROOF_SECONDS: Final = 1.0
#: A subscription that was proved longer ago than this may be broken.
TRUSTED_SECONDS: Final = 2.5
#: Pause before a broken connection is made again.
RECONNECT_SECONDS: Final = 0.5

logger = logging.getLogger(__name__)


class Subscription:
    """Subscribes to one channel, again after each loss of the connection."""

    def __init__(
        self, broker: BrokerSettings, url: str | None, channel: str, on_message: Callable[[bytes], None]
    ) -> None:
        """Take the channel and what to do with a message; nothing is connected yet.

        Args:
            on_message: called on the loop; what it raises is logged.
        """
        self.channel = channel
        self._on_message = on_message
        self._link = RedisLink(broker, url, on_message=self._pass_on)
        self._proved_at = float("-inf")
        #: When the newest question was asked that was answered.
        self._asked_at = float("-inf")

    @property
    def lag_seconds(self) -> float:
        """How old a message is at most that is passed on now.

        Redis answers a question after what it published before, so whatever comes after the answer was
        published after the question was asked. No clock of another host is compared.
        """
        return time.monotonic() - self._asked_at

    @property
    def stands(self) -> bool:
        """Whether it stood a moment ago; what is published now will most likely come."""
        return time.monotonic() - self._proved_at < TRUSTED_SECONDS

    async def listen(self) -> NoReturn:
        """Subscribe and stay subscribed; ends with its task."""
        while True:
            try:
                await self._link.execute("SUBSCRIBE", self.channel)
                while await self._is_subscribed():
                    self._proved_at = time.monotonic()
                    await asyncio.sleep(PROOF_SECONDS)
            except (redis.RedisError, OSError) as exc:  # whoever publishes takes the other way
                logger.debug("the subscription to %s broke: %s", self.channel, exc)
            self._proved_at = float("-inf")
            await asyncio.sleep(RECONNECT_SECONDS)

    async def settle(self) -> None:
        """Wait until everything has been passed on that was published before this was called.

        Raises:
            redis.RedisError, OSError: the connection broke; what was on its way is lost.
        """
        await self._link.execute("PING")

    def abort(self) -> None:
        """Close the connection."""
        self._proved_at = float("-inf")
        self._link.abort()

    async def _is_subscribed(self) -> bool:
        asked_at = time.monotonic()
        # A connection that was made again without its subscription answers with a mere word.
        if not isinstance(await self._link.execute("PING"), list):
            return False
        self._asked_at = asked_at
        return True

    def _pass_on(self, message: bytes) -> None:
        try:
            self._on_message(message)
        except Exception:  # the next one is another matter
            logger.exception("a message on %s could not be handled", self.channel)
