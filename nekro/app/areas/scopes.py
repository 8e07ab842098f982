"""Uses of areas on a host: by a run, in the scope of a call, job or request, and outside of all scopes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import Final, Protocol

from nekro.app.background import BackgroundLoop, Poll
from nekro.base.tasks import complete, log_errors
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import StorageError
from storage.driver.errors import outlasting
from storage.files.host_files import AreaInUse, AreaPlace, HostFiles
from storage.files.manifest import LeaseWriter, Writer

__all__ = ["BRING_SECONDS", "AreaScope", "RunUse", "SyncedUse", "UnscopedUses"]

#: How long a thread waits for an area at most. Code outside of all scopes keeps an area as long after its
#: last request.
BRING_SECONDS: Final = 600


class SyncedUse:
    """A use of an area by a thread or loop of this process; see ``AreaInUse``."""

    def __init__(self, use: AreaInUse, background: BackgroundLoop) -> None:
        self.place = use.place
        self._use = use
        self._background = background

    async def pull(self) -> None:
        """Bring what others have committed; may raise as ``AreaInUse.pull``."""
        await self._background.wait(self._use.pull())

    async def push_quiet(self, *, writer: LeaseWriter) -> bool:
        """Commit what has changed here; True if files change now, and nothing was committed.

        May raise as ``AreaInUse.push``.
        """
        return (await self._background.wait(self._use.push(writer=writer, is_quiet=True))).is_busy

    async def push(self, *, writer: Writer | LeaseWriter | None = None) -> dict[str, str]:
        """Commit what has changed here; returns reasons by path of what cannot be kept.

        May raise as ``AreaInUse.push``.
        """
        return (await self._background.wait(self._use.push(writer=writer))).left_out


class RunUse:
    """Implements ``nekro.sandbox.run_files.UsedAreas``; calls of one program may use it at the same time."""

    def __init__(self, shared: SyncedUse, uploads: SyncedUse, writer: Writer | None) -> None:
        self._shared = shared
        self._uploads = uploads
        self._writer = writer

    async def pull(self) -> None:
        """Bring what others have committed to both areas."""
        await self._shared.pull()
        await self._uploads.pull()

    async def push(self) -> dict[str, str]:
        """Commit what has changed in the shared files; returns reasons by path of what cannot be kept."""
        return await self._shared.push(writer=self._writer)


class AreasOfHost(Protocol):
    """What scopes need of ``SyncedAreas``."""

    background: BackgroundLoop
    files: HostFiles
    #: Started at the first use of an area.
    host_sweep: Poll


class AreaScope:
    """The areas that a call, a job or a request uses; thread-safe."""

    def __init__(self, areas: AreasOfHost, label: str) -> None:
        self.label = label
        self._areas = areas
        #: Changed on the background loop only.
        self._uses: dict[str, SyncedUse] = {}
        self._held = contextlib.AsyncExitStack()
        self._changing = asyncio.Lock()
        self._entering: asyncio.Task[object] | None = None
        self._is_begun = False
        self.is_closed = False

    def require(self, place: AreaPlace) -> None:
        """Bring an area, and keep it until the end; blocks."""
        if place.name not in self._uses:
            self._is_begun = True
            self._areas.background.answer(self._enter(place), seconds=BRING_SECONDS)

    async def bring(self, place: AreaPlace) -> SyncedUse:
        """The same, without blocking the loop."""
        if place.name not in self._uses:
            self._is_begun = True
            await self._areas.background.wait(self._enter(place))
        return self._uses[place.name]

    @outlasting
    async def push(self) -> None:
        """Commit what has changed in each area; it may raise as ``AreaInUse.push``."""
        for use in list(self._uses.values()):
            await use.push()

    async def close(self) -> None:
        """End the uses, also of code that goes on; what it requests later belongs to no scope."""
        self.is_closed = True
        if self._is_begun:
            # A use that does not end would keep its area from being restored.
            await complete(self._areas.background.wait(self._end()))

    @property
    def used(self) -> frozenset[str]:
        """Kinds of the areas that were used."""
        return frozenset(name.partition("/")[0] for name in list(self._uses))

    async def _enter(self, place: AreaPlace) -> None:
        async with self._changing:
            if self.is_closed:
                raise StorageError(f"the call that requests {place.name} has ended")
            if place.name in self._uses:
                return
            self._entering = asyncio.current_task()
            try:
                use = await self._held.enter_async_context(self._areas.files.use(place))
                self._areas.host_sweep.start()
            finally:
                self._entering = None
            self._uses[place.name] = SyncedUse(use, self._areas.background)

    async def _end(self) -> None:
        if self._entering is not None:
            self._entering.cancel()
        async with self._changing:
            await self._held.aclose()


class UnscopedUses:
    """The areas that code outside of all scopes uses, such as tasks that an init hook or a call left running.

    Such code states no end. Therefore its process keeps an area in use for ten minutes after the last request
    for its path, and commits what has changed within seconds. What is written later is not committed: the
    next use removes it, and logs that.
    """

    def __init__(self, areas: AreasOfHost) -> None:
        self._areas = areas
        #: Used on the background loop only.
        self._kept: dict[str, _Kept] = {}
        self._poll = Poll(
            areas.background,
            self._step,
            seconds=FRESH_SECONDS,
            is_needed=lambda: bool(self._kept),
            on_error="areas_not_committed",
        )

    async def bring(self, place: AreaPlace) -> None:
        """Make the directory have the version of the last second; runs on the background loop."""
        kept = self._kept.setdefault(place.name, _Kept(scope=AreaScope(self._areas, "")))
        self._poll.start()
        kept.requested_at = time.monotonic()
        is_fresh = kept.requested_at - kept.pulled_at < FRESH_SECONDS
        use = await kept.scope.bring(place)
        if not is_fresh:
            await use.pull()
            kept.pulled_at = time.monotonic()

    async def push(self) -> None:
        """Commit what has changed; runs on the background loop."""
        for kept in list(self._kept.values()):
            await kept.scope.push()

    async def close(self) -> None:
        """Commit what has changed, and end the uses; runs on the background loop."""
        for name in list(self._kept):
            await self._drop(name)

    async def _step(self) -> None:
        for name, kept in list(self._kept.items()):
            idle = time.monotonic() - kept.requested_at
            if idle >= BRING_SECONDS:
                await self._drop(name)
            elif time.monotonic() >= kept.next_at:
                # A scan of a large area takes a while, and who has just requested it changes it soon.
                kept.next_at = time.monotonic() + idle / 10
                with log_errors("area_not_committed", area=name):
                    await kept.scope.push()

    async def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        try:
            with log_errors("area_not_committed", area=name):
                await kept.scope.push()
        finally:
            await kept.scope.close()


@dataclass(kw_only=True)
class _Kept:
    """An area that code outside of all scopes uses; times are of ``time.monotonic``."""

    scope: AreaScope
    requested_at: float = 0.0
    pulled_at: float = -math.inf
    #: When its changes are looked for.
    next_at: float = 0.0
