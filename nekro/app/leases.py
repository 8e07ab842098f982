"""The keeper of a process's leases on rows, and the kinds of these leases.

All of them behave alike:

- They are renewed on the background loop, so work that blocks its own loop keeps its leases. A lease is
  renewed when a third of its duration is over, together with those of its kind that are half as old.
- A renewal that fails, for whatever reason, is logged and repeated within a second.
- A lease is lost when its row was ended or acquired by another holder. Leases of some kinds are also lost
  when their time is over (``LeaseKind.is_lost_with_time``); those of the others can still be renewed.
- A loss is final. It is logged, counted, and reported to the holder once, unless it dropped the lease before.
- The end that the holder itself records is not a loss, also if a renewal sees it first
  (``HeldLease.ending``).
- When the background loop is closed, renewal ends and nothing is reported.

Time is measured with ``elapsed_seconds``, from before the request that acquired or renewed the lease. It
includes suspensions of the host, so a lease never lasts longer here than in the database.

The stream of a client of the SSE adapter has no lease: its newest connection has it, whatever the one
before does, and the row says when the client was seen (``AdapterRepository.connect``)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.base.metrics import metrics
from nekro.base.tasks import log_errors
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import FencedError, StorageUnavailableError
from nekro_agent.shared_clock import elapsed_seconds
from storage.catalogue import WORKER_LEASES
from storage.engine import Database
from storage.repositories.calls import CALL_CLAIMS
from storage.repositories.chats import CHAT_LEASES, ChatRepository
from storage.repositories.jobs import JOB_CLAIMS
from storage.repositories.leases import (
    DOWNLOAD_CLAIMS,
    NAMED_LEASES,
    REQUEST_CLAIMS,
    LeaseRepository,
    LeaseTable,
)
from storage.transaction import Transaction

__all__ = [
    "CALL",
    "CHAT",
    "DOWNLOAD",
    "INIT",
    "JOB",
    "PINNED",
    "REQUEST",
    "SUMMARY",
    "SWEEP",
    "WORKER",
    "HeldLease",
    "LeaseKeeper",
    "LeaseKind",
    "on_this_loop",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseKind:
    """A kind of leases."""

    #: As in the metric ``nekro_leases_lost_total``.
    name: str
    table: LeaseTable
    #: Whether a lease that was not renewed in time is lost, even if no other holder has acquired it: its
    #: work has effects that neither a fencing token nor ``HeldLease.ensure`` prevents. Otherwise it is
    #: renewed when the database answers again, so that an outage does not end the work.
    is_lost_with_time: bool
    #: The repository that acquires and releases the lease; None if the statements that start and finish the
    #: work do so.
    rows: Callable[[Transaction], ChatRepository | LeaseRepository] | None = None


_named_kind: Final = partial(LeaseKind, table=NAMED_LEASES, rows=lambda transaction: transaction.leases)

#: A running call. Its outcome is refused if the claim passed on; the method itself is not stopped.
CALL: Final = LeaseKind(name="call", table=CALL_CLAIMS, is_lost_with_time=False)
#: The rounds of a chat. Each call of a round is preceded by ``ensure``.
CHAT: Final = LeaseKind(
    name="chat", table=CHAT_LEASES, is_lost_with_time=False, rows=lambda transaction: transaction.chats
)
#: A background job, which may run for hours and survives outages of the database.
JOB: Final = LeaseKind(name="job", table=JOB_CLAIMS, is_lost_with_time=False)
#: A download: two writers would corrupt its file, and the next holder resumes it.
DOWNLOAD: Final = LeaseKind(name="download", table=DOWNLOAD_CLAIMS, is_lost_with_time=True)
#: The init hooks of the plugins: one process at a time.
INIT: Final = _named_kind(name="init", is_lost_with_time=True)
#: A plugin whose state is in one process.
PINNED: Final = _named_kind(name="pinned", is_lost_with_time=True)
#: A request with an idempotency key. After a loss another execution answers, and this answer is not stored.
REQUEST: Final = LeaseKind(name="request", table=REQUEST_CLAIMS, is_lost_with_time=False)
#: The summaries of a chat. A second writer costs a request; the row of a version is written once.
SUMMARY: Final = _named_kind(name="summary", is_lost_with_time=False)
#: The sweep; overlapping sweeps are harmless, because each takes rows exclusively.
SWEEP: Final = _named_kind(name="sweep", is_lost_with_time=False)
#: A worker in the catalogue. One that was suspended or cut off renews it afterwards, or enters again.
WORKER: Final = LeaseKind(name="worker", table=WORKER_LEASES, is_lost_with_time=False)


#: How often, per lease duration, leases are checked and those that are due renewed.
_RENEWALS: Final = 3

_CHECKS: Final = 12
#: Most leases that one statement renews.
_BATCH: Final = 500


class LeaseKeeper:
    """Renews the leases of one process."""

    def __init__(self, database: Database, background: BackgroundLoop) -> None:
        self.database = database
        self._background = background
        self._lock = threading.Lock()
        self._groups: dict[tuple[LeaseKind, float], _Group] = {}

    async def acquire(
        self,
        kind: LeaseKind,
        key: str,
        *,
        owner: str,
        seconds: float,
        limit_seconds: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> HeldLease | None:
        """Acquire a lease of a kind that has ``rows``, and hold it; None when another holder has it.

        The other arguments are those of ``hold``.
        """
        assert kind.rows is not None  # noqa: S101 - see above
        since = elapsed_seconds()
        async with self.database.autocommit() as transaction:
            fence = await kind.rows(transaction).acquire(key, owner=owner, lease_seconds=seconds)
        if fence is None:
            return None
        return self.hold(
            kind, key, fence, seconds=seconds, since=since, limit_seconds=limit_seconds, on_lost=on_lost
        )

    def hold(
        self,
        kind: LeaseKind,
        key: str,
        fence: int,
        *,
        seconds: float,
        since: float | None = None,
        limit_seconds: float | None = None,
        on_lost: Callable[[], object] | None = None,
    ) -> HeldLease:
        """Renew a lease from now on; thread-safe.

        Args:
            fence: fencing token of the lease.
            seconds: duration of the lease and of each renewal.
            since: ``elapsed_seconds`` before the request that acquired the lease; None means now.
            limit_seconds: how long it is renewed at most, counted from now and again from each ``ensure``
                or ``confirm``; None means until it is dropped.
            on_lost: called once on the loss, on any thread; it must neither block nor raise.

        Raises:
            RuntimeError: the background loop was closed.
        """
        group = self._groups.get((kind, seconds)) or self._new_group(kind, seconds)
        now = elapsed_seconds()
        lease = HeldLease(
            group, key, fence, now if since is None else since, limit_seconds, on_lost, _asked_at=now
        )
        group.add(lease)
        return lease

    def _new_group(self, kind: LeaseKind, seconds: float) -> _Group:
        with self._lock:
            group = self._groups.get((kind, seconds))
            if group is None:
                group = _Group(self.database, kind, seconds)
                self._background.submit(group.keep())
                self._groups[kind, seconds] = group
            return group


@dataclass(eq=False, slots=True)
class HeldLease:
    """A lease of this process, usable from any thread; ``async with`` releases it."""

    _group: _Group
    key: str
    #: The fencing token.
    fence: int
    #: When the newest confirmed renewal was requested, and when the holder last asked for the lease.
    renewed_at: float
    _limit_seconds: float | None
    _on_lost: Callable[[], object] | None
    _asked_at: float
    _is_lost: bool = field(default=False, init=False)
    _is_dropped: bool = field(default=False, init=False)
    _is_ending: bool = field(default=False, init=False)
    _is_released: bool = field(default=False, init=False)

    @property
    def seconds_left(self) -> float:
        """How long this process certainly holds the lease, unless it is lost; 0 or less: its time is over."""
        return self.renewed_at + self._group.seconds - elapsed_seconds()

    @property
    def is_lost(self) -> bool:
        """Whether another process has the lease, or the lease was lost with its time; final."""
        is_lost_with_time = self._group.kind.is_lost_with_time and not self._is_dropped
        return self._is_lost or (is_lost_with_time and self.seconds_left <= 0)

    async def ensure(self) -> None:
        """Return if this process certainly holds the lease; call it before an effect.

        Raises:
            FencedError: the lease was lost.
            StorageUnavailableError: its time is over, and the database does not answer.
        """
        self._asked_at = elapsed_seconds()
        if self._is_lost or self.seconds_left <= 0:
            await self.confirm()

    async def confirm(self) -> None:
        """Renew the lease now.

        Raises:
            FencedError: the lease was lost.
            StorageUnavailableError: the database does not answer.
        """
        self._asked_at = elapsed_seconds()
        if not self.is_lost:
            await self._group.renew([self], waits=True)
        if self.is_lost:
            raise FencedError(f"the lease on {self._group.kind.name} {self.key!r} was lost")

    def drop(self) -> None:
        """Stop renewing; a loss is not reported any more. Idempotent."""
        self._is_dropped = True
        self._group.remove(self)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record the end of the row in this block, during which the lease is renewed; it is dropped then.

        A renewal that finds the row ended reports no loss, unless the block raises: then its end was not
        recorded, and the lease was lost.
        """
        self._is_ending = True
        try:
            yield
        except BaseException:
            self._is_ending = False
            if self._is_lost:  # found meanwhile
                self.lose()
            raise
        finally:
            self.drop()

    async def release(self) -> None:
        """Drop the lease and free its row. Idempotent; if it fails, the lease runs out by itself."""
        self.drop()
        rows = self._group.kind.rows
        if rows is None or self._is_released:
            return
        self._is_released = True
        with log_errors("lease_not_released", lease=self._group.kind.name, key=self.key):
            async with self._group.database.autocommit() as transaction:
                await rows(transaction).release(self.key, fence=self.fence)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    def lose(self) -> None:
        """Record that the lease was lost, for example because a write was refused; reports it once."""
        self._is_lost = True
        if self._is_ending or not self._group.remove(self):
            return  # the holder ends it, has dropped it, or knows already
        metrics().leases_lost.labels(self._group.kind.name).inc()
        logger.bind(lease=self._group.kind.name, key=self.key, fence=self.fence).error("lease_lost")
        if self._on_lost is not None:
            with log_errors("lease_loss_not_handled", lease=self._group.kind.name, key=self.key):
                self._on_lost()

    def may_be_renewed(self, now: float) -> bool:
        """Whether the limit of its renewals is not reached."""
        return self._limit_seconds is None or now < self._asked_at + self._limit_seconds


class _Group:
    """The leases of one kind and duration; they are renewed together."""

    def __init__(self, database: Database, kind: LeaseKind, seconds: float) -> None:
        self.database = database
        self.kind = kind
        self.seconds = seconds
        # The longest pause is how late a suspension of the host is noticed.
        self._pause = min(seconds / _CHECKS, FRESH_SECONDS)
        self._lock = threading.Lock()
        self._leases: set[HeldLease] = set()
        self._renewal: asyncio.Task[None] | None = None

    def add(self, lease: HeldLease) -> None:
        """Renew a lease from now on."""
        with self._lock:
            self._leases.add(lease)

    def remove(self, lease: HeldLease) -> bool:
        """Stop renewing a lease; False if it was not renewed."""
        with self._lock:
            is_held = lease in self._leases
            self._leases.discard(lease)
        return is_held

    async def keep(self) -> None:
        """Renew the leases until the loop is closed."""
        while True:
            await asyncio.sleep(self._pause)
            with log_errors("leases_not_renewed", lease=self.kind.name):
                await self._check()
            if self.kind.is_lost_with_time:
                for lease in self._held():
                    # Before its time is over: the next check would come too late.
                    if lease.seconds_left <= self._pause:
                        lease.lose()

    async def renew(self, leases: Sequence[HeldLease], *, waits: bool = False) -> None:
        """Renew leases now; those that are lost are reported.

        Args:
            waits: as in ``LeaseRepository.renew``.
        """
        asked_at, by_row = elapsed_seconds(), {(lease.key, lease.fence): lease for lease in leases}
        async with self.database.autocommit() as transaction:
            renewal = await transaction.leases.renew(
                self.kind.table, list(by_row), lease_seconds=self.seconds, waits=waits
            )
        for row in renewal.kept:
            by_row[row].renewed_at = max(by_row[row].renewed_at, asked_at)
        for row in renewal.lost:
            by_row[row].lose()

    def _held(self) -> list[HeldLease]:
        with self._lock:
            return list(self._leases)

    async def _check(self) -> None:
        """Renew the leases that are due. A slow renewal runs on, so that losses are noticed in time."""
        if self._renewal is None:
            now, third = elapsed_seconds(), self.seconds / _RENEWALS
            leases = [lease for lease in self._held() if lease.may_be_renewed(now)]
            if not any(now - lease.renewed_at >= third for lease in leases):
                return
            due = [lease for lease in leases if now - lease.renewed_at >= third / 2]
            self._renewal = asyncio.create_task(self._renew_all(due, seconds=third))
        await asyncio.wait({self._renewal}, timeout=self._pause)
        if self._renewal.done():
            renewal, self._renewal = self._renewal, None
            renewal.result()

    async def _renew_all(self, leases: list[HeldLease], *, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                for start in range(0, len(leases), _BATCH):
                    await self.renew(leases[start : start + _BATCH])
        except TimeoutError as exc:
            raise StorageUnavailableError(f"the database did not answer within {seconds:g} s") from exc


def on_this_loop(function: Callable[[], object]) -> Callable[[], None]:
    """Return a thread-safe function that runs another one on the running loop, if that has not ended."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return call
