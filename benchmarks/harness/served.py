"""Waits for methods that workers publish, and calls them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nekro.app.calls.dispatch import CallScope
    from nekro.app.services import Services
    from nekro.plugins.entries import MethodEntry
    from nekro.wire.invocation import Envelope

__all__ = ["call_served", "served"]


async def served(services: Services, method: str) -> MethodEntry:
    """Return a method of the fleet, as soon as a worker publishes what it serves.

    Raises:
        MethodNotFoundError: the workers do not have it.
    """
    from nekro_agent.durations import POLL_SECONDS

    while not (await services.read_catalogue()).is_live:
        await asyncio.sleep(POLL_SECONDS)
    return await services.find_method(method)


async def call_served(
    services: Services, entry: MethodEntry, arguments: str, scope: CallScope, *, seconds: float
) -> Envelope:
    """Call a method for a chat, and wait for its result for at most that time."""
    from nekro.wire.invocation import new_id

    deadline = datetime.now(UTC) + timedelta(seconds=seconds)
    invocation = scope.call(entry, arguments, call_id=new_id(), deadline=deadline)
    return await services.caller.call(invocation, lane=services.dispatcher.lane_of(entry))
