"""The stream of changes: hints about all chats and the fleet, so that clients need not poll.

Events of chats are announced by the processes that write them. Everything else is watched: once per process,
and only while a reader may follow it, the gateway reads the fingerprints of
``nekro.gateway.streams.change_kinds`` and sends a hint for each difference. Hints are collected for
``REFRESH_SECONDS``, so a reader costs a few writes per second under any load.

A position is ``<epoch>.<number>``. The epoch changes whenever hints may have been missed; a reader that comes
back with a position of the present epoch gets what it missed, each other one the hint ``reset``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from typing import Final

from nekro.app.services import Services
from nekro.base.tasks import end_tasks, log_errors
from nekro.gateway.streams.change_kinds import SOURCES, ChangeReader, Hint, Marks, kinds_of
from nekro.gateway.streams.hub import EventHub
from nekro.operations.actor import Identity
from nekro.wire.invocation import new_id
from nekro_agent.durations import FRESH_SECONDS, REFRESH_SECONDS
from nekro_agent.shared_clock import shared_time
from nekro_client.models import ChangeKind, EventType

__all__ = ["Changes"]

#: How long the gateway goes on watching after its last reader has left: pages that are reloaded, and
#: connections that are lost, come back within it and miss nothing.
_LINGER_SECONDS: Final = 30.0
#: Different hints whose newest number is kept, for readers that come back.
_MOST_KEPT: Final = 5_000
#: Every so many rounds of watching, events are looked for whose announcement was lost.
_LOST_EVERY: Final = 5
#: How far back that looks: three such searches. An event that takes longer from its time to its commit is
#: sent only with the chat's next one.
_LOST_SECONDS: Final = 15.0
_KINDS: Final[Mapping[str, tuple[ChangeKind, ...]]] = {
    EventType.MESSAGE_RECEIVED: (ChangeKind.CHATS,),
    EventType.MESSAGE_SENT: (ChangeKind.CHATS,),
    EventType.MESSAGE_NOTED: (ChangeKind.CHATS,),
    EventType.FILE_SENT: (ChangeKind.CHATS,),
    EventType.TURN_STARTED: (ChangeKind.TURNS,),
    EventType.TURN_ENDED: (ChangeKind.TURNS,),
    EventType.ROUND_STARTED: (ChangeKind.TURNS,),
    EventType.PROGRAM_RESUMED: (ChangeKind.TURNS,),
    EventType.ROUND_ENDED: (ChangeKind.TURNS,),
    EventType.JOB_STARTED: (ChangeKind.JOBS,),
    EventType.JOB_PROGRESS: (ChangeKind.JOBS,),
    EventType.JOB_ENDED: (ChangeKind.JOBS,),
    EventType.WAIT_ENDED: (ChangeKind.TURNS,),
    EventType.APPROVAL_REQUESTED: (ChangeKind.APPROVALS,),
    #: Also the turn that waited for it.
    EventType.APPROVAL_DECIDED: (ChangeKind.APPROVALS, ChangeKind.TURNS),
}
#: Of events whose types are not known.
_ALL_OF_CHAT: Final = tuple(dict.fromkeys(chain.from_iterable(_KINDS.values())))


class Changes:
    """The readers of changes of one gateway process; use it on one event loop."""

    def __init__(self, services: Services, hub: EventHub) -> None:
        """Watch nothing; the first reader starts that."""
        self._services, self._hub = services, hub
        self._readers: set[ChangeReader] = set()
        self._observed = ExitStack()
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        self._number = 0
        #: The number of each hint's newest occurrence, the oldest first.
        self._kept: dict[Hint, int] = {}
        #: Every hint with a greater number is kept.
        self._forgotten = 0
        self._waiting: dict[Hint, None] = {}
        self._flushing: asyncio.TimerHandle | None = None
        self._flushed_at = float("-inf")
        self._marks: dict[ChangeKind, Marks] = {}
        self._looking = asyncio.Lock()
        self._begin_epoch()
        #: Number up to which the events of a hint were passed on. Not per chat: the announcement of an event
        #: of another kind says nothing about one that was lost before.
        self._events: dict[Hint, int] = {}

    async def stream(self, identity: Identity, *, last_id: str | None) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events until the key is no longer valid or the gateway stops.

        Args:
            last_id: id of the last event that the reader has; None begins.
        """
        reader = ChangeReader(identity)
        with self._hub.owned(identity, reader.end):
            await self._begin(reader)
            try:
                self._resume(reader, last_id)
                while not (reader.is_ended or self._is_closed):
                    if frames := reader.take(self._position):
                        yield frames
                    await reader.wait()
            finally:
                self._readers.discard(reader)
                if not self._readers and not self._is_closed:
                    asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._stop_unless_read)

    def end(self) -> None:
        """End every stream; clients connect again, to another gateway."""
        self._is_closed = True
        for reader in self._readers:
            reader.end()

    async def close(self) -> None:
        """End every stream, and watch no more."""
        self.end()
        await end_tasks(self._watching)
        self._stop()

    def added(self, chat_key: str, number: int, types: frozenset[str]) -> None:
        """Process an announcement of events; see ``nekro.gateway.streams.hub.Observer``."""
        kinds: Iterable[ChangeKind] = _ALL_OF_CHAT
        if types:
            kinds = set(chain.from_iterable(_KINDS.get(one, ()) for one in types))
        # Each announcement comes from the process itself and from the broker.
        hints = [hint for kind in kinds if number > self._events.get(hint := Hint(kind, chat_key), 0)]
        self._events |= dict.fromkeys(hints, number)
        self._pass_on(hints)

    def missed(self) -> None:
        """Send every reader the hint to read all again: it missed events, or the database lost some."""
        self._begin_epoch()
        self._events.clear()
        for reader in self._readers:
            reader.reset()

    @property
    def _position(self) -> str:
        return f"{self._epoch}.{self._number}"

    async def _begin(self, reader: ChangeReader) -> None:
        """Attach a reader; what changes from now on reaches it."""
        self._readers.add(reader)
        if self._watching is None:
            self._begin_epoch()
            self._observed.enter_context(self._hub.observed(self))
            self._watching = asyncio.create_task(self._watch(), name="nekro-changes")
        # Without the broker the stream begins all the same, and everything is read again when it is back.
        await self._hub.listening()
        with log_errors("changes_not_read"):
            await self._look(self._wanted() - self._marks.keys())

    def _resume(self, reader: ChangeReader, last_id: str | None) -> None:
        """Send a reader the hints that it missed, or ``reset`` if not all of them are known."""
        epoch, _, number = (last_id or "").partition(".")
        after = int(number) if number.isascii() and number.isdigit() else -1
        if epoch != self._epoch or not self._forgotten <= after <= self._number:
            reader.reset()
        else:
            reader.add(hint for hint, at in self._kept.items() if at > after)

    def _begin_epoch(self) -> None:
        self._epoch, self._epoch_at = new_id()[:16], shared_time()
        self._kept.clear()
        self._forgotten = self._number

    def _stop_unless_read(self) -> None:
        if not self._readers and self._watching is not None:
            self._watching.cancel()
            self._stop()

    def _stop(self) -> None:
        """Forget everything; a reader that comes later begins another epoch."""
        self._watching = None
        self._observed.close()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        for known in (self._waiting, self._marks, self._events):
            known.clear()

    def _pass_on(self, hints: Iterable[Hint]) -> None:
        """Pass hints to the readers soon, together with those that come until then."""
        self._waiting.update(dict.fromkeys(hints))
        if self._waiting and self._flushing is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._flushed_at + REFRESH_SECONDS)
            self._flushing = loop.call_at(at, self._flush)

    def _flush(self) -> None:
        self._flushing, self._flushed_at = None, asyncio.get_running_loop().time()
        hints, self._waiting = list(self._waiting), {}
        for hint in hints:
            self._number += 1
            self._kept.pop(hint, None)  # to the end
            self._kept[hint] = self._number
        while len(self._kept) > _MOST_KEPT:
            self._forgotten = self._kept.pop(next(iter(self._kept)))
        for reader in self._readers:
            reader.add(hints)

    async def _watch(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(FRESH_SECONDS)
            rounds += 1
            wanted = self._wanted()
            for kind in self._marks.keys() - wanted:
                del self._marks[kind]
            for kind in wanted:  # one that cannot be read keeps none of the others from being read
                with log_errors("changes_not_read", kind=kind.value):
                    await self._look({kind})
            if rounds % _LOST_EVERY == 0:
                with log_errors("lost_announcements_not_looked_for"):
                    await self._find_lost()

    def _wanted(self) -> frozenset[ChangeKind]:
        """Return the kinds to watch."""
        kinds = {kind for one in {reader.identity for reader in self._readers} for kind in kinds_of(one)}
        return frozenset(kinds & SOURCES.keys())

    async def _look(self, kinds: Iterable[ChangeKind]) -> None:
        """Read fingerprints, and send hints for what differs from the last ones."""
        async with self._looking:
            for kind in kinds:
                marks = await SOURCES[kind](self._services)
                known = self._marks.get(kind, marks)
                self._marks[kind] = marks
                changed = (key for key in known.keys() | marks.keys() if known.get(key) != marks.get(key))
                self._pass_on(Hint(kind, key) for key in changed)

    async def _find_lost(self) -> None:
        """Send hints for events whose announcement was lost, and forget numbers that are no longer needed."""
        before = dict(self._events)
        found = await self._recent()
        newest: dict[str | None, int] = {}
        for hint, number in found.items():
            newest[hint.chat_key] = max(number, newest.get(hint.chat_key, 0))
        lost = [hint for hint, number in found.items() if number > self._events.get(hint, 0)]
        # An announcement that is on its way may name a later event of the same transaction.
        self._events |= {hint: newest[hint.chat_key] for hint in lost}
        for hint, number in before.items():
            if hint not in found and self._events.get(hint) == number:
                del self._events[hint]
        self._pass_on(lost)

    async def _recent(self) -> dict[Hint, int]:
        """Return the newest number of an event per hint; at its beginning a reader reads what was before."""
        since = max(self._epoch_at, shared_time() - timedelta(seconds=_LOST_SECONDS))
        async with self._services.database.read() as transaction:
            rows = await transaction.change_listing.recent_events(since=since)
        newest: dict[Hint, int] = {}
        for chat_key, kind, number in rows:
            for changed in _KINDS.get(kind, ()):
                hint = Hint(changed, chat_key)
                newest[hint] = max(number, newest.get(hint, 0))
        return newest
