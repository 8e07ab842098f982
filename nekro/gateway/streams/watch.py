"""The process's one subscription to the announcements on ``agent.events``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from loguru import logger

from broker_config.topology import EVENTS_ADDED, LIVE_EVENT
from nekro.app.services import Services
from nekro.base.tasks import end_tasks
from nekro.broker.event_watch import EventWatcher, WatchedEvent
from nekro.gateway.streams.events import StreamEvent, live_event
from nekro_agent.durations import DEFER_SECONDS, RETRY_SECONDS
from nekro_agent.errors import BrokerUnavailableError

__all__ = ["EventWatch"]


class EventWatch:
    """Polls a queue of its own while there is a reader; kombu's sockets block, so a thread does it."""

    def __init__(
        self,
        services: Services,
        *,
        on_added: Callable[[str, int, frozenset[str]], None],
        on_live: Callable[[str, StreamEvent], None],
        on_begun: Callable[[], None],
    ) -> None:
        """Open nothing.

        Args:
            on_added: called on the loop with a chat, the number of its newest event, and the types of the new
                ones; without types: any.
            on_live: called on the loop with a chat and a live event.
            on_begun: called on the loop when announcements are received from now on: earlier ones were not,
                at the beginning, after each outage, and when there were too many.
        """
        self._services = services
        self._on_added, self._on_live, self._on_begun = on_added, on_live, on_begun
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="event-watch")
        self._needed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_up = True
        #: Set while announcements are received.
        self._listening = asyncio.Event()
        #: Announcements that the present watcher has dropped.
        self._dropped = 0

    def start(self) -> None:
        """Poll from now on while it is needed."""
        self._task = asyncio.create_task(self._watch(), name="nekro-event-watch")

    def need(self, is_needed: bool) -> None:
        """Whether there is a reader."""
        if is_needed:
            self._needed.set()
        else:
            self._needed.clear()

    async def listening(self, *, seconds: float) -> bool:
        """Wait until what is announced from now on is received; False if it is not after ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._listening.wait()
        return self._listening.is_set()

    async def close(self) -> None:
        """Delete the queue and close the connection."""
        await end_tasks(self._task)
        await asyncio.to_thread(self._thread.shutdown)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._needed.wait()
            watcher = EventWatcher(self._services.app, self._services.settings.broker, chat_key=None)
            self._dropped = 0
            try:
                while self._needed.is_set():
                    pause = await self._poll(loop, watcher)
                    await asyncio.sleep(pause)
            finally:
                self._listening.clear()
                # Not awaited, because this task may be cancelled; the one thread runs it after the poll.
                self._thread.submit(watcher.__exit__, None, None, None)

    async def _poll(self, loop: asyncio.AbstractEventLoop, watcher: EventWatcher) -> float:
        """Pass on what has come; returns the pause before the next poll."""
        try:
            events = await loop.run_in_executor(self._thread, watcher.poll)
        except BrokerUnavailableError as exc:
            self._listening.clear()
            if self._is_up:
                logger.bind(error=str(exc)).warning("event_announcements_not_received")
            self._is_up = False
            return RETRY_SECONDS
        except Exception:  # the subscription must go on; readers look by themselves meanwhile
            self._listening.clear()
            logger.exception("event_announcements_not_received")
            return RETRY_SECONDS
        self._is_up = True
        if not self._listening.is_set() or watcher.dropped != self._dropped:
            self._dropped = watcher.dropped
            self._listening.set()
            self._on_begun()
        for event in events:
            self._pass_on(event)
        return 0 if events else DEFER_SECONDS

    def _pass_on(self, event: WatchedEvent) -> None:
        body = event.body
        chat_key, number = body.get("chat_key"), body.get("number")
        if not isinstance(chat_key, str):
            return  # from a process of another release
        if event.name == EVENTS_ADDED and isinstance(number, int):
            types = body.get("types")
            known = types if isinstance(types, list) else ()  # another release announces without them
            self._on_added(chat_key, number, frozenset(one for one in known if isinstance(one, str)))
        elif event.name == LIVE_EVENT and (live := live_event(body)) is not None:
            self._on_live(chat_key, live)
