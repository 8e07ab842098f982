"""Announcements of new events and live events, from all processes to those that show them, over one channel
of Redis.

Redis stores no announcement. A kept event is a row that readers also find without its announcement, within
``FRESH_SECONDS``; a live event that no process receives is lost. Subscribers have a connection of their own:
Redis disconnects a subscriber that is too far behind, and a flood of live text must not delay results.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from loguru import logger

from broker_config.keys import Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings
from nekro.base.tasks import end_tasks
from nekro.broker.redis.subscription import Subscription
from nekro.wire import plain_json

__all__ = ["Announcements", "Announcer"]

#: Kinds of messages. The body of the first is ``{"chat_key", "number", "types"}``: the number of the newest
#: event and the types of all new ones; that of the second is the event.
_ADDED: Final = "added"
_LIVE: Final = "live"


def _place(settings: Settings) -> tuple[str | None, str]:
    """Return the URL and the channel: those of the results, which every fleet has in Redis."""
    return settings.results.url or settings.broker.url, Keys(prefix=settings.broker.key_prefix).events


class Announcer:
    """Publishes the announcements of one process; thread-safe.

    Its methods block for one round trip, and raise ``redis.RedisError`` or ``OSError`` if it fails.
    """

    def __init__(self, settings: Settings) -> None:
        """Open no connection."""
        url, self._channel = _place(settings)
        self._client = RedisEndpoint(settings.broker, url).client()

    def added(self, chat_key: str, number: int, types: frozenset[str]) -> None:
        """Announce that a chat has events up to ``number``, the new ones of these types; none: unknown."""
        self._publish(_ADDED, {"chat_key": chat_key, "number": number, "types": sorted(types)})

    def live(self, chat_key: str, event: Mapping[str, Any]) -> None:
        """Publish an event that is not kept."""
        self._publish(_LIVE, {**event, "chat_key": chat_key})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _publish(self, kind: str, body: Mapping[str, Any]) -> None:
        self._client.publish(self._channel, plain_json.dump({"kind": kind, "body": body}))


class Announcements:
    """Receives the announcements of all processes while it is needed; use it on one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_added: Callable[[str, int, frozenset[str]], None],
        on_live: Callable[[str, Mapping[str, Any]], None],
        on_begun: Callable[[], None],
    ) -> None:
        """Open nothing.

        Args:
            on_added: called on the loop with a chat, the number of its newest event, and the types of the new
                ones; without types: any.
            on_live: called on the loop with a chat and a live event as its process published it, which may be
                of another release.
            on_begun: called on the loop when announcements are received from now on: earlier ones were not,
                at the beginning, after each outage, and when there were too many.
        """
        #: The Redis that announces.
        self.url, self._channel = _place(settings)
        self._broker = settings.broker
        self._subscription = self._new_subscription()
        self._on_added, self._on_live, self._on_begun = on_added, on_live, on_begun
        self._task: asyncio.Task[None] | None = None
        #: Set while announcements are received.
        self._listening = asyncio.Event()
        #: Why the last attempt to receive failed, and since when attempts have failed; None if it did not.
        self.failure: Exception | None = None
        self._failing_since = 0.0

    def need(self, is_needed: bool) -> None:
        """Begin to receive, or stop."""
        if is_needed and self._task is None:
            self._task = asyncio.create_task(self._subscription.listen(), name="nekro-announcements")
        elif not is_needed and self._task is not None:
            self._task.cancel()
            self._task = None
            self._subscription.abort()
            self._subscription = self._new_subscription()
            self._listening.clear()

    async def listening(self, *, seconds: float) -> bool:
        """Wait until what is announced from now on is received; False if it is not after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._listening.wait()
        return self._listening.is_set()

    def require(self, *, seconds: float) -> None:
        """Return unless every attempt to receive has failed for so long.

        Raises:
            BrokerUnavailableError: it has.
        """
        if self.failure is not None and time.monotonic() - self._failing_since >= seconds:
            from nekro.broker.publishing import unavailable

            raise unavailable(self.url, self.failure) from self.failure

    async def close(self) -> None:
        """Stop to receive."""
        task = self._task
        self.need(False)
        await end_tasks(task)

    def _new_subscription(self) -> Subscription:
        return Subscription(
            self._broker,
            self.url,
            self._channel,
            self._pass_on,
            on_subscribed=self._begin,
            on_broken=self._end,
        )

    def _begin(self) -> None:
        self.failure = None
        self._listening.set()
        self._on_begun()

    def _end(self, failure: Exception) -> None:
        self._listening.clear()
        if self.failure is None:
            self._failing_since = time.monotonic()
            logger.bind(error=str(failure)).warning("event_announcements_not_received")
        self.failure = failure

    def _pass_on(self, message: bytes) -> None:
        try:
            kind, body = (found := plain_json.load(message))["kind"], found["body"]
            chat_key, number, types = body["chat_key"], body.get("number"), body.get("types", ())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return  # from a process of another release
        if not isinstance(chat_key, str):
            return
        if kind == _LIVE:
            self._on_live(chat_key, body)
        elif kind == _ADDED and isinstance(number, int) and isinstance(types, list | tuple):
            self._on_added(chat_key, number, frozenset(one for one in types if isinstance(one, str)))
