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
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from loguru import logger

from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.base.greenlet_bridge import at_loop_close
from nekro.base.tasks import end_tasks, log_errors
from nekro.broker.redis.link import RedisLink
from nekro.broker.redis.subscription import Subscription
from nekro.wire import plain_json

__all__ = ["Announcements", "Announcer"]

#: Kinds of messages. The body of the first is ``{"chat_key", "number", "types"}``: the number of the newest
#: event and the types of all new ones; that of the second is the event.
_ADDED: Final = "added"
_LIVE: Final = "live"
#: Most live events of a loop that wait to be published; further ones are dropped.
MOST_LIVE: Final = 64


def _place(settings: Settings) -> tuple[str | None, str]:
    """Return the URL and the channel: those of the results, which every fleet has in Redis."""
    return settings.results.url or settings.broker.url, Keys(prefix=settings.broker.key_prefix).events


class Announcer:
    """Publishes the announcements of one process, those of an event loop over a connection of that loop.

    What is announced while earlier announcements are on their way goes out together after them. A failure is
    logged, and what could not be published is not repeated.
    """

    def __init__(self, settings: Settings) -> None:
        """Open no connection."""
        self._settings = settings
        self._outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()
        self._is_closed = False

    def added(self, chat_key: str, number: int, types: frozenset[str], *, delay_seconds: float = 0) -> None:
        """Announce that a chat has events up to ``number``; returns at once. Call it on an event loop.

        Several announcements of a chat that wait are published as one.

        Args:
            types: of the new events; none: unknown.
            delay_seconds: publish after this time, unless something else is published before.
        """
        if not self._is_closed:
            self._outbox().add(chat_key, number, types, delay_seconds=delay_seconds)

    def live(self, chat_key: str, event: Mapping[str, Any]) -> bool:
        """Publish an event that is not kept; returns at once. Call it on an event loop.

        False: it was dropped, because too many wait or the announcer was closed.
        """
        return not self._is_closed and self._outbox().add_live(chat_key, event)

    async def close(self) -> None:
        """Publish what waits on the running loop, and close its connection; nothing is announced later."""
        self._is_closed = True
        outbox = self._outboxes.get(asyncio.get_running_loop())
        if outbox is not None:
            await outbox.close()

    def _outbox(self) -> _Outbox:
        loop = asyncio.get_running_loop()
        outbox = self._outboxes.get(loop)
        if outbox is None:
            outbox = self._outboxes[loop] = _Outbox(self._settings)
            at_loop_close(outbox.close)
        return outbox


@dataclass(slots=True)
class _Added:
    """New events of a chat, as in ``Announcer.added``."""

    chat_key: str
    number: int
    types: frozenset[str]

    def join(self, number: int, types: frozenset[str]) -> None:
        """Add further events; of unknown types with known ones, not all are known."""
        self.number = max(self.number, number)
        self.types = self.types | types if self.types and types else frozenset()

    def message(self) -> bytes:
        """Return the message that announces them."""
        body = {"chat_key": self.chat_key, "number": self.number, "types": sorted(self.types)}
        return plain_json.dump({"kind": _ADDED, "body": body})


@dataclass(frozen=True, slots=True)
class _Live:
    """A live event of a chat."""

    chat_key: str
    event: Mapping[str, Any]

    def message(self) -> bytes:
        """Return the message that contains it."""
        return plain_json.dump({"kind": _LIVE, "body": {**self.event, "chat_key": self.chat_key}})


class _Outbox:
    """What waits on one event loop to be published, and the connection for it."""

    def __init__(self, settings: Settings) -> None:
        url, self._channel = _place(settings)
        self._link = RedisLink(settings.broker, url)
        #: In the order in which it is published.
        self._waiting: list[_Added | _Live] = []
        self._added: dict[str, _Added] = {}
        self._live = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    def add(self, chat_key: str, number: int, types: frozenset[str], *, delay_seconds: float) -> None:
        waiting = self._added.get(chat_key)
        if waiting is not None:
            waiting.join(number, types)
        else:
            added = self._added[chat_key] = _Added(chat_key, number, types)
            self._waiting.append(added)
        if delay_seconds == 0:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_seconds, self._send)

    def add_live(self, chat_key: str, event: Mapping[str, Any]) -> bool:
        if self._live >= MOST_LIVE:
            return False
        self._live += 1
        self._waiting.append(_Live(chat_key, event))
        self._send()
        return True

    async def close(self) -> None:
        """Publish what waits, and close the connection; what is added later opens it again."""
        try:
            self._send()
            if self._sending is not None:
                await self._sending
        finally:
            await self._link.close()

    def _send(self) -> None:
        """Publish what waits, after what is on its way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="nekro-announcer")

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting, self._added, self._live = self._waiting, [], {}, 0
                replies = []
                for one in waiting:
                    with log_errors("announcement_not_encoded"):
                        replies.append(self._link.begin("PUBLISH", self._channel, one.message()))
                for reply in await asyncio.gather(*replies, return_exceptions=True):
                    if isinstance(reply, Exception):
                        logger.bind(error=type(reply).__name__).warning("announcement_not_published")
        finally:
            self._sending = None


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
