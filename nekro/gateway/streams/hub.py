"""The event hub: one subscription and one reading of each new row per process, for any number of readers.

Readers take what is kept from the rows, in order, so an announcement only wakes them: losing the broker
delays events by ``FRESH_SECONDS`` and loses none. A reader that falls so far behind that the ring has passed
it is ended; it connects again with its last number and does not slow the others.

A database that fails over to a standby may lose its last transactions, and gives the numbers of their events
again. The hub compares the newest event that it has with the database's, at each reading and every
``FRESH_SECONDS``. It ends the readers of a chat that has lost events, and they read the chat again.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from loguru import logger

from nekro.base.tasks import end_tasks, log_errors
from nekro.broker.announcements import Announcements
from nekro.gateway.streams.events import (
    ChatRing,
    Position,
    Reader,
    StreamEvent,
    live_event,
    mark_of,
    stream_event,
)
from nekro.operations.actor import Identity
from nekro_agent.durations import FRESH_SECONDS, RETRY_SECONDS
from nekro_agent.errors import StorageError
from storage.repositories.events import ChatEvent

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.app.chats.publisher import EventPublisher
    from storage.engine import Database

__all__ = ["EventHub", "EventsLostError", "Observer", "SlowReaderError"]

T = TypeVar("T")
#: Rows of one reading.
_PAGE: Final = 200
#: Readings at a time: readers that connect again together must not take every database connection.
_READINGS: Final = 4
#: Chats of one check for missed announcements.
_CHECKED: Final = 500


class SlowReaderError(Exception):
    """A reader did not take its events; its stream ends, and it can resume after its last number."""


class EventsLostError(Exception):
    """A reader may have events that the database has lost; its stream ends, and it reads the chat again."""

    def __init__(self, chat_key: str) -> None:
        super().__init__(f"the database has lost events of chat {chat_key!r}; read the chat again")


class Observer(Protocol):
    """Receives the announcements of new events of all chats."""

    def added(self, chat_key: str, number: int, types: frozenset[str]) -> None:
        """Called with the number of a chat's newest event and the types of the new ones; empty: unknown."""

    def missed(self) -> None:
        """Called when announcements were missed until now, or the database has lost events."""


class EventHub:
    """The streams of one process; use it on one event loop."""

    def __init__(
        self, settings: Settings, database: Database, *, publisher: EventPublisher | None = None
    ) -> None:
        """Open nothing; ``start`` does.

        Args:
            settings: with every URL resolved.
            publisher: of this process, whose events need no broker; None: it publishes none.
        """
        self._database = database
        self._publisher = publisher
        #: Set when announcements begin to be received: those before were missed.
        self._begun = asyncio.Event()
        self._announcements = Announcements(
            settings, on_added=self._added, on_live=self._live, on_begun=self._begin_to_receive
        )
        self._observers: list[Observer] = []
        #: Whose streams are open, and what ends each.
        self._owners: dict[Callable[[], None], str | None] = {}
        self._channels: dict[str, ChatRing] = {}
        #: By chat, those that get live events only, so that they need nothing of the database.
        self._live_readers: dict[str, set[Reader]] = {}
        self._readings = asyncio.Semaphore(_READINGS)
        self._checking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to watch."""
        self._loop = asyncio.get_running_loop()
        if self._publisher is not None:
            self._publisher.listeners.append(self._announced_here)
        self._checking = asyncio.create_task(self._check_repeatedly(), name="nekro-event-check")

    def end(self) -> None:
        """End every stream; clients connect again, to another gateway."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.wake()

    async def close(self) -> None:
        """End every stream and the subscription."""
        self.end()
        if self._publisher is not None and self._announced_here in self._publisher.listeners:
            self._publisher.listeners.remove(self._announced_here)
        await end_tasks(self._checking, *(channel.reading for channel in self._channels.values()))
        await self._announcements.close()

    @property
    def readers(self) -> int:
        """Number of readers of chats."""
        readers = (*(channel.readers for channel in self._channels.values()), *self._live_readers.values())
        return sum(map(len, readers))

    async def stream(
        self,
        chat_key: str,
        *,
        after: int | None = None,
        types: Collection[str] = (),
        with_live: bool = True,
        owner: Identity | None = None,
        give_up_seconds: float | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of a chat in order, kept ones exactly once; it ends when the hub closes.

        Args:
            after: number of the last event that the reader has; 0 begins with the oldest that is kept, None
                with the next one. A number that the chat has not reached counts as its newest.
            types: only events of these types; () means all.
            with_live: also live events, which may be missing.
            owner: who reads; it also ends as ``owned`` says. None: this process.
            give_up_seconds: how long the broker may be out of reach, once it has answered; None: for ever.

        Raises:
            BrokerUnavailableError: the broker did not answer, or was out of reach for ``give_up_seconds``.
            SlowReaderError: the reader did not take its events.
            EventsLostError: the database has lost events that were yielded.
            StorageUnavailableError: the database did not answer when the stream began.
        """
        newest = await self.newest(chat_key, after=after)
        position = newest.number if after is None else min(max(0, after), newest.number)
        with self._reading(chat_key, newest, position) as (channel, reader), ExitStack() as held:
            if owner is not None:
                held.enter_context(self.owned(owner, reader.end))
            # The first reader of a gateway begins the subscription.
            if with_live and not await self.listening() and give_up_seconds is not None:
                self._announcements.require(seconds=0)
            while not (self._is_closed or reader.is_ended):
                for event in await self._following(channel, reader):
                    reader.position = event.number or reader.position
                    if not types or event.event.type in types:
                        yield event
                # Events that came while the reader was busy are next.
                if channel.newest > reader.position:
                    continue
                while reader.live and with_live:
                    event = reader.live.popleft()
                    if not types or event.event.type in types:
                        yield event
                if channel.newest <= reader.position and not (self._is_closed or reader.is_ended):
                    await self._wait(reader, give_up_seconds)

    async def _wait(self, reader: Reader, give_up_seconds: float | None) -> None:
        """Wait for events of a reader; raises as ``stream`` if the broker is out of reach."""
        if give_up_seconds is None:
            await reader.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FRESH_SECONDS):
                await reader.wait()
        self._announcements.require(seconds=give_up_seconds)

    @asynccontextmanager
    async def live(self, chat_key: str) -> AsyncIterator[Reader]:
        """Yield a reader whose ``live`` receives every live event of a chat from now on, and no kept one.

        Without the broker it begins all the same, and events are missing.
        """
        reader = Reader(position=0)
        self._live_readers.setdefault(chat_key, set()).add(reader)
        self._need()
        try:
            await self.listening()
            yield reader
        finally:
            self._live_readers[chat_key].remove(reader)
            if not self._live_readers[chat_key]:
                del self._live_readers[chat_key]
            self._need()

    async def _following(self, channel: ChatRing, reader: Reader) -> Sequence[StreamEvent]:
        """Return the next kept events of a reader; none if it has all that were read."""
        if channel.is_lost:
            raise EventsLostError(channel.chat_key)
        if channel.has(reader.position):
            reader.has_reached_ring = True
            return channel.after(reader.position)
        if reader.has_reached_ring:
            raise SlowReaderError(
                f"a reader of chat {channel.chat_key!r} needs events that are no longer in memory"
            )
        rows = await self._read_with_retries(self._page, channel.chat_key, reader.position)
        # Later ones come by the ring: the hub notices the loss of no event that it does not know.
        rows = [row for row in rows if row.number <= channel.newest]
        if not rows:  # retention has just deleted them
            reader.position = channel.newest
        return [stream_event(row) for row in rows]

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Receive announcements, also without readers, and pass them to an observer inside the block."""
        self._observers.append(observer)
        self._need()
        try:
            yield
        finally:
            self._observers.remove(observer)
            self._need()

    @contextmanager
    def owned(self, owner: Identity, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` in the block when the owner's key is revoked or expires, within a second."""
        self._owners[end] = owner.key_id
        try:
            yield
        finally:
            del self._owners[end]

    async def listening(self) -> bool:
        """Wait until what is announced from now on is received; False if the broker does not answer."""
        return await self._announcements.listening(seconds=FRESH_SECONDS)

    def announced(self, chat_key: str, number: int) -> None:
        """Read the new events of a chat, if it has readers."""
        channel = self._channels.get(chat_key)
        if channel is None or number <= channel.newest:
            return
        channel.announced = max(number, channel.announced)
        if channel.reading is None:
            channel.reading = asyncio.create_task(self._read_on(channel), name="nekro-events-read")

    def _announced_here(self, chat_key: str, number: int, types: frozenset[str]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._added, chat_key, number, types)

    def _added(self, chat_key: str, number: int, types: frozenset[str]) -> None:
        self.announced(chat_key, number)
        for observer in self._observers:
            observer.added(chat_key, number, types)

    def _begin_to_receive(self) -> None:
        self._begun.set()
        for observer in self._observers:
            observer.missed()

    def _need(self) -> None:
        has_readers = bool(self._channels or self._live_readers or self._observers)
        self._announcements.need(has_readers and not self._is_closed)

    def _live(self, chat_key: str, body: Mapping[str, Any]) -> None:
        channel = self._channels.get(chat_key)
        readers = (*(channel.readers if channel else ()), *self._live_readers.get(chat_key, ()))
        event = live_event(body) if readers else None
        if event is not None:
            for reader in readers:
                reader.add_live(event)

    @contextmanager
    def _reading(self, chat_key: str, newest: Position, position: int) -> Iterator[tuple[ChatRing, Reader]]:
        """Attach a reader to its chat's channel, which exists as long as it has readers."""
        channel = self._channels.get(chat_key)
        if channel is None:
            channel = self._channels[chat_key] = ChatRing(chat_key, newest=newest)
        else:
            self.announced(chat_key, newest.number)
        reader = Reader(position=position)
        channel.readers.add(reader)
        self._need()
        try:
            yield channel, reader
        finally:
            channel.readers.discard(reader)
            if not channel.readers and self._channels.get(chat_key) is channel:
                del self._channels[chat_key]
                if channel.reading is not None:
                    channel.reading.cancel()
            self._need()

    async def _read_on(self, channel: ChatRing) -> None:
        """Read rows until everything that was announced is in the ring."""
        try:
            while channel.newest < channel.announced:
                # With the newest one that is known, which the database must still have.
                rows = await self._read_with_retries(self._page, channel.chat_key, max(0, channel.newest - 1))
                if rows and rows[0].number == channel.newest:
                    known = rows.pop(0)
                    if channel.mark not in (None, mark_of(known.created_at)):
                        self._lose(channel)
                        return
                if not rows:  # announced by a transaction of a database that has lost it
                    channel.announced = channel.newest
                    return
                channel.add([(row.number, stream_event(row)) for row in rows])
        finally:
            channel.reading = None

    async def _page(self, chat_key: str, after: int) -> list[ChatEvent]:
        async with self._readings, self._database.read() as transaction:
            return await transaction.events.after(chat_key, number=after, limit=_PAGE)

    def _lose(self, channel: ChatRing) -> None:
        """End the streams of a chat whose newest events the database has lost."""
        logger.bind(chat_key=channel.chat_key, number=channel.newest).warning("events_lost")
        if self._channels.get(channel.chat_key) is channel:
            del self._channels[channel.chat_key]
        channel.is_lost = True
        channel.wake()
        for observer in self._observers:
            observer.missed()

    async def checked(self, chat_key: str, position: Position, newest: Position) -> Position:
        """Return where a reader goes on; it must have events that the database still has, or had once.

        A position without a mark is not checked; beyond the newest event it counts as that one.

        Raises:
            EventsLostError: the database has another event with that number, or none yet.
            StorageUnavailableError: the database does not answer.
        """
        if position.number > newest.number:
            if position.mark is None:
                return newest
            raise EventsLostError(chat_key)
        channel = self._channels.get(chat_key)
        found = None if channel is None else channel.find(position.number)
        mark = newest.mark if position.number == newest.number else found.mark if found else None
        if mark is None and position.mark is not None:
            rows = await self._page(chat_key, position.number - 1)
            mark = next((mark_of(row.created_at) for row in rows if row.number == position.number), None)
        if None not in (mark, position.mark) and mark != position.mark:
            raise EventsLostError(chat_key)
        return position

    async def newest(self, chat_key: str, *, after: int | None = None) -> Position:
        """Return a chat's newest event; number 0 when it has none.

        It is read from the database unless the chat has readers here that are at ``after`` or beyond: of
        many clients that connect again together, one per chat makes a query.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        async with self._readings:
            channel = self._channels.get(chat_key)
            if channel is not None and (after is None or after <= channel.newest):
                return Position(channel.newest, channel.mark)
            async with self._database.read() as transaction:
                number, at = (await transaction.events.newest([chat_key])).get(chat_key, (0, None))
            return Position(number, mark_of(at))

    async def _read_with_retries(
        self, read: Callable[[str, int], Awaitable[T]], chat_key: str, after: int
    ) -> T:
        """Read, also through an outage of the database: its readers keep their connections."""
        while True:
            try:
                return await read(chat_key, after)
            except StorageError as exc:
                logger.bind(chat_key=chat_key, error=str(exc)).warning("events_not_read")
            await asyncio.sleep(RETRY_SECONDS)

    async def _check_repeatedly(self) -> None:
        """Find events whose announcement was lost, and chats whose events the database has lost.

        Also as soon as announcements are received: a turn may be over before the subscription of its only
        reader is there.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FRESH_SECONDS):
                    await self._begun.wait()
            self._begun.clear()
            with log_errors("keys_of_streams_not_checked"):
                await self._end_invalid()
            keys = list(self._channels)
            for begin in range(0, len(keys), _CHECKED):
                with log_errors("events_not_checked"):
                    await self._check(keys[begin : begin + _CHECKED])

    async def _end_invalid(self) -> None:
        owners = {key_id for key_id in self._owners.values() if key_id is not None}
        if not owners:
            return
        async with self._database.read() as transaction:
            ended = owners - await transaction.keys.valid_of(owners)
        for end, key_id in list(self._owners.items()):
            if key_id in ended:
                end()

    async def _check(self, chat_keys: Collection[str]) -> None:
        # As they are before the query: what is read meanwhile may be newer than its result.
        known = {
            key: (channel, channel.newest, channel.mark)
            for key in chat_keys
            if (channel := self._channels.get(key))
        }
        async with self._database.read() as transaction:
            found = await transaction.events.newest(list(known))
        for chat_key, (channel, newest, mark) in known.items():
            number, at = found.get(chat_key, (0, None))
            is_other = number == newest and None not in (at, mark) and mark_of(at) != mark
            if number < newest or is_other:
                self._lose(channel)
            else:
                self.announced(chat_key, number)
