"""The sweep: finds recorded work that has no worker or whose message was lost, and sends it again.

Every worker has a sweeper, whatever its lane, because a fleet without rounds workers has timers and
jobs too. A lease lets one of them sweep at a time. The sweep also drops the queues that
processes of 0.2 bound to `agent.events` and left when they were killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from celery import Celery
from loguru import logger

from broker_config.keys import Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import AgentSettings, BrokerSettings
from broker_config.topology import AGENT_EVENTS
from broker_config.urls import is_redis
from nekro.app.calls.detached import settle
from nekro.app.calls.records import outcome_unknown
from nekro.app.chats.publisher import EventPublisher
from nekro.app.leases import SWEEP, HeldLease, LeaseKeeper
from nekro.base.tasks import end_tasks, log_errors
from nekro.broker.celery.names import delete_binding
from nekro.broker.delivery.messages import CallMessage
from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS
from nekro_agent.errors import (
    FencedError,
    MessageRefusedError,
)
from nekro_agent.shared_clock import elapsed_seconds
from storage.engine import Database
from storage.repositories.calls import CallRepository

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher
    from nekro.wire.invocation import Signer
    from storage.engine import Database
    from storage.repositories.calls import Call

__all__ = [
    "CallSweep",
    "Sweep",
    "Sweeper",
    "WatchSweep",
]

#: Most rows of one sweep; the next sweep takes the rest.
_BATCH: Final = 500


class CallSweep:
    """Sends recorded calls again that no worker has claimed within a time limit.

    A message may be delayed and not lost: while messages wait in the queues the workers are
    behind, and second copies would add to the backlog. The claim makes a second copy harmless.
    """

    def __init__(
        self, database: Database, publisher: EventPublisher, signer: Signer, *, waiting_seconds: float
    ) -> None:
        """Create the sweep.

        Args:
            waiting_seconds: how long a message may take to reach an idle worker.
        """
        self._database = database
        self._publisher = publisher
        self._signer = signer
        self._waiting_seconds = waiting_seconds

    async def sweep(self) -> float | None:
        """Send again what is due; always returns None, because the time of the next work is unknown."""
        async with self._database.begin() as transaction:
            calls = await transaction.calls.take_unclaimed(
                waiting_seconds=self._waiting_seconds, limit=_BATCH
            )
        if calls:
            sent = await self._publisher.calls_lost(list(self._messages(calls)))
            logger.bind(unclaimed=len(calls), sent=sent).warning("calls_sent_again")
        return None

    def _messages(self, calls: Iterable[Call]) -> Iterable[CallMessage]:
        for call in calls:
            try:
                yield CallMessage.from_row(call.invocation or {}, signer=self._signer)
            except MessageRefusedError as exc:
                logger.bind(call_id=call.id, error=str(exc)).warning("call_cannot_be_sent_again")


#: How long the queue of a watcher is kept after the watcher died or lost its connection.
ABANDONED_SECONDS: Final = 120
#: Prefix of the queues of watchers, followed by the watcher's id.
_WATCH_PREFIX: Final = "watch."


class WatchSweep:
    """Drops the queues in Redis that killed gateways and commands of 0.2 left, as often as they expire.

    Such a queue would collect requests for rounds for ever. Goes when no process of 0.2 can be in a fleet.
    """

    def __init__(self, app: Celery, settings: BrokerSettings) -> None:
        self._app = app
        self._settings = settings
        self._next_at = time.monotonic()

    async def sweep(self) -> float | None:
        """Drop abandoned queues; returns the seconds until the next check."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + ABANDONED_SECONDS
            dropped = await asyncio.to_thread(self._drop_abandoned)
            if dropped:
                logger.bind(queues=dropped).info("abandoned_watchers_dropped")
        return self._next_at - time.monotonic()

    def _drop_abandoned(self) -> int:
        """Delete the queues of watchers whose presence has expired; returns how many."""
        if not is_redis(self._settings.url or ""):
            return 0  # RabbitMQ deletes them
        keys, endpoint = (
            Keys(prefix=self._settings.key_prefix),
            RedisEndpoint(self._settings, self._settings.url),
        )
        dropped = 0
        with self._app.connection_for_write() as connection, endpoint.client() as client:
            channel = connection.default_channel
            for routing_key, pattern, queue in channel.get_table(AGENT_EVENTS.name):
                watcher = queue.removeprefix(_WATCH_PREFIX)
                if watcher != queue and not client.exists(keys.watcher(watcher)):
                    delete_binding(channel, queue, AGENT_EVENTS.name, routing_key, pattern)
                    dropped += 1
        return dropped


#: Does the due work of one kind; returns the seconds until there is more, or None if that is unknown.
Sweep = Callable[[], Awaitable[float | None]]

_LEASE: Final = "sweep"
#: Length of the lease in periods. A sweep that takes longer may overlap with another one, which is
#: harmless because each takes rows exclusively.
_LEASE_PERIODS: Final = 2


class Sweeper:
    """Sweeps every ``sweep_seconds`` while it holds the lease; earlier when work is due earlier."""

    def __init__(
        self,
        database: Database,
        leases: LeaseKeeper,
        publisher: EventPublisher,
        settings: AgentSettings,
        *,
        owner: str,
        sweeps: Sequence[Sweep] = (),
    ) -> None:
        """Create the sweeper.

        Args:
            sweeps: sweeps in addition to the one for rounds and calls; a failure of one does not stop
                the others.
        """
        self._database = database
        self._leases = leases
        self._publisher = publisher
        self._period_seconds = settings.sweep_seconds
        self._owner = owner
        self._sweeps = (self.sweep, *sweeps)
        self._task: asyncio.Task[None] | None = None
        self._lease: HeldLease | None = None

    def start(self) -> None:
        """Start to sweep on the running loop."""
        #: When the database answered last.
        self._reached_at = elapsed_seconds()
        self._task = asyncio.create_task(self._sweep_forever(), name="nekro-sweep")

    async def close(self) -> None:
        """Stop, and release the lease."""
        await end_tasks(self._task)
        if self._lease is not None:
            await self._lease.release()

    async def sweep(self) -> float | None:
        """End calls whose worker died, and announce chats that wait for a worker.

        Returns the seconds until the first lease on a running round expires if its worker does not
        renew it, so that this chat is not left waiting for the next period.
        """
        async with self._database.begin() as transaction:
            calls = CallRepository(transaction.connection)
            lost = await calls.sweep_lost(limit=_BATCH)
            expired = await calls.sweep_expired(limit=_BATCH)
            for call in (*lost, *expired):
                await settle(transaction, self._publisher, call)
        for call in lost:
            logger.bind(call_id=call.id, method=call.method).warning("call_outcome_unknown")
            await self._publisher.call_ended(call, outcome_unknown(call))
        async with self._database.read() as transaction:
            due = await transaction.rounds.due_chats(limit=_BATCH, waiting_seconds=self._period_seconds)
            seconds = await transaction.rounds.seconds_until_orphaned()
        if due:
            sent = await self._publisher.rounds_overdue(due)
            logger.bind(chats=len(due), announced=sent).info("sweep_found_rounds")
        return seconds

    async def _sweep_forever(self) -> None:
        await asyncio.sleep(FRESH_SECONDS)  # the first calls go first
        while True:
            # Without the lease it checks twice as often, because the holder may be dead.
            pause_seconds = self._period_seconds / 2
            with log_errors("sweep_failed"):  # the next sweep finds what this one missed
                if await self._hold_lease():
                    await self._let_holders_renew()
                    pause_seconds = await self._sweep_all()
                else:
                    self._reached_at = elapsed_seconds()
            await asyncio.sleep(pause_seconds)

    async def _let_holders_renew(self) -> None:
        """Wait for half a lease if leases of living holders ran out during an outage of the database.

        Holders renew them three times in a lease, so a shorter outage leaves them valid.
        """
        if elapsed_seconds() - self._reached_at > 2 * self._period_seconds:
            await asyncio.sleep(1.5 * self._period_seconds)

    async def _sweep_all(self) -> float:
        pauses = [self._period_seconds]
        for sweep in self._sweeps:
            # The first pass compiles the statements of all sweeps, on the loop that runs calls: not at once.
            await asyncio.sleep(POLL_SECONDS)
            with log_errors("sweep_failed", sweep=sweep.__qualname__):  # the other sweeps must still run
                seconds = await sweep()
                self._reached_at = elapsed_seconds()
                if seconds is not None:
                    pauses.append(max(seconds, POLL_SECONDS))
        return min(pauses)

    async def _hold_lease(self) -> bool:
        if self._lease is not None:
            with suppress(FencedError):
                await self._lease.confirm()
                return True
        seconds = self._period_seconds * _LEASE_PERIODS
        # The limit lets another process sweep when this one's sweep or its event loop hangs.
        self._lease = await self._leases.acquire(
            SWEEP, _LEASE, owner=self._owner, seconds=seconds, limit_seconds=seconds
        )
        return self._lease is not None
