"""A subscription to one channel of Redis.

A subscriber gets messages without a request for each, which saves a round trip. Messages are not stored:
what they announce is stored elsewhere, or the publisher uses a queue if PUBLISH reports no subscriber.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from loguru import logger

from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings
from nekro.broker.redis.link import RedisLink
from nekro_agent.durations import FRESH_SECONDS, RETRY_SECONDS

__all__ = ["MAX_PUBLISHED_BYTES", "Subscription"]

#: Maximum length of a published message. Redis disconnects a subscriber that is 32 MiB behind (its default).
MAX_PUBLISHED_BYTES: Final = 16 << 10


class Subscription:
    """Subscribes to one channel, and again after each lost connection."""

    def __init__(
        self,
        broker: BrokerSettings,
        url: str | None,
        channel: str,
        on_message: Callable[[bytes], None],
        *,
        on_subscribed: Callable[[], None] = lambda: None,
        on_broken: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Set the channel and the callbacks; ``listen`` connects.

        Args:
            on_message: called on the loop with each message; its errors are logged.
            on_subscribed: called after each subscription; earlier messages may have been missed.
            on_broken: called with the reason when messages are missed from now on; the next attempt follows.
        """
        self.channel = channel
        self._on_subscribed, self._on_broken = on_subscribed, on_broken
        self._link = RedisLink(broker, url, on_message=on_message)
        self._proved_at = float("-inf")
        self._is_aborted = False
        #: When the newest answered ping was sent.
        self._asked_at = float("-inf")

    @property
    def lag_seconds(self) -> float:
        """Maximum age of a message that arrives now.

        Redis answers a ping after the messages it published before, so a message that arrives after the
        answer was published after the ping was sent. No clock of another host is involved.
        """
        return time.monotonic() - self._asked_at

    @property
    def stands(self) -> bool:
        """Whether the subscription was confirmed recently, so that messages will most likely arrive."""
        # One confirmation may be late, or lost.
        return time.monotonic() - self._proved_at < 2.5 * FRESH_SECONDS

    async def listen(self) -> None:
        """Subscribe and stay subscribed, until the task is cancelled or ``abort`` is called.

        A cancelled task alone may go on: before CPython 3.12 ``asyncio.wait_for``, in which redis-py sends
        its handshake, loses a cancellation that comes with the end of what it waits for.
        """
        while not self._is_aborted:
            try:
                await self._link.execute("SUBSCRIBE", self.channel)
                if not self._is_aborted:
                    self._on_subscribed()
                while not self._is_aborted and await self._is_subscribed():
                    self._proved_at = time.monotonic()
                    await asyncio.sleep(FRESH_SECONDS)
                raise redis.ConnectionError("the connection to Redis was replaced")
            except (redis.RedisError, OSError) as exc:  # missed messages are read elsewhere
                if self._is_aborted:
                    break
                logger.bind(channel=self.channel, error=str(exc)).debug("subscription_broken")
                self._proved_at = float("-inf")
                self._on_broken(exc)
            await asyncio.sleep(RETRY_SECONDS)

    async def settle(self) -> None:
        """Wait until every message that was published before this call has been passed on.

        Raises:
            redis.RedisError, OSError: the connection broke; messages in flight are lost.
        """
        await self._link.execute("PING")

    def abort(self) -> None:
        """Close the connection; ``listen`` ends."""
        self._is_aborted = True
        self._proved_at = float("-inf")
        self._link.abort()

    async def _is_subscribed(self) -> bool:
        asked_at = time.monotonic()
        # A connection without a subscription answers PING with a string instead of a list.
        if not isinstance(await self._link.execute("PING"), list):
            return False
        self._asked_at = asked_at
        return True
