"""Renews the claims of running calls, so that claims can be short while calls are long.

The claim of a dead worker ends soon, and the caller learns that the outcome is unknown long
before its deadline. Renewal runs on the background loop, so a method that blocks its own loop
keeps its claim.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from storage.engine import Database
from workers.leases.keeping import report_loss, survived
from workers.pools.background import BackgroundLoop

__all__ = ["ClaimKeeper"]


@dataclass(frozen=True, kw_only=True)
class _Held:
    fence: int
    #: On the monotonic clock: when it was claimed, and when renewal stops even if the call still runs.
    since: float
    until: float


class ClaimKeeper:
    """Renews the claims of one process; calls that end within a sixth of the lease cost nothing."""

    def __init__(self, database: Database, background: BackgroundLoop, *, lease_seconds: float) -> None:
        self._database = database
        self._background = background
        self.lease_seconds = lease_seconds
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._is_running = False

    def hold(self, call_id: str, *, fence: int, seconds: float) -> None:
        """Renew a claim from now on, for ``seconds`` at most; thread-safe."""
        now = time.monotonic()
        with self._lock:
            self._held[call_id] = _Held(fence=fence, since=now, until=now + seconds)
            is_first, self._is_running = not self._is_running, True
        if is_first:
            self._background.submit(self._renew_forever())

    def drop(self, call_id: str) -> None:
        """Stop renewing a claim; thread-safe."""
        with self._lock:
            self._held.pop(call_id, None)

    async def _renew_forever(self) -> None:
        period = self.lease_seconds / 3
        while True:
            await asyncio.sleep(period)
            with survived("claims_not_renewed"):  # the next attempt comes before the claims end
                await self._renew(older_than_seconds=period / 2)

    async def _renew(self, *, older_than_seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            fences = {
                call_id: held.fence
                for call_id, held in self._held.items()
                if now - held.since > older_than_seconds and now < held.until
            }
        if not fences:
            return
        async with self._database.autocommit() as transaction:
            lost = await transaction.calls.renew(fences, lease_seconds=self.lease_seconds)
        with self._lock:
            lost &= self._held.keys()  # the others have ended meanwhile
            for call_id in lost:
                del self._held[call_id]
        for call_id in lost:
            report_loss("call", call_id=call_id)
