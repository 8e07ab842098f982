"""One process of the fleet at a time runs hooks that may change a plugin's data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from nekro.app.leases.keeper import HeldLease, LeaseKeeper, on_this_loop
from nekro.app.leases.kinds import INIT
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import FencedError

__all__ = ["init_lock"]

_LEASE: Final = "plugins.init"
#: How long a worker that starts waits for one that died during its hooks.
_LEASE_SECONDS: Final = 15.0


@asynccontextmanager
async def init_lock(leases: LeaseKeeper, *, owner: str, plugin_key: str = "") -> AsyncIterator[None]:
    """Hold the lease for a block; losing it cancels the block and raises ``FencedError`` at its end.

    Args:
        plugin_key: of the only plugin whose hooks run; "" means all plugins.
    """
    task, is_inside = asyncio.current_task(), True

    def interrupt() -> None:
        if task is not None and is_inside:
            task.cancel()

    name = f"{_LEASE}:{plugin_key}" if plugin_key else _LEASE
    lease = await _acquire(leases, name, owner=owner, on_lost=on_this_loop(interrupt))
    try:
        yield
    except asyncio.CancelledError:
        if not lease.is_lost:
            raise
    finally:
        is_inside, was_lost = False, lease.is_lost
        await lease.release()
    if was_lost:
        raise FencedError(
            "the lease for running the plugins' init hooks was lost, so another process may run them too; "
            "restart this worker, and check whether the database was down or this host was suspended"
        )


async def _acquire(leases: LeaseKeeper, name: str, *, owner: str, on_lost: Callable[[], None]) -> HeldLease:
    """Wait for the lease."""
    while True:
        lease = await leases.acquire(INIT, name, owner=owner, seconds=_LEASE_SECONDS, on_lost=on_lost)
        if lease is not None:
            return lease
        await asyncio.sleep(POLL_SECONDS)
