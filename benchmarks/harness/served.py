"""Waits for methods that workers publish."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.catalogue.entries import MethodEntry
    from workers.composition import Services

__all__ = ["served"]


async def served(services: Services, method: str) -> MethodEntry:
    """Return a method of the fleet, as soon as a worker publishes what it serves.

    Raises:
        MethodNotFoundError: the workers do not have it.
    """
    from nekro_agent.durations import POLL_SECONDS

    while not (await services.read_catalogue()).is_live:
        await asyncio.sleep(POLL_SECONDS)
    return await services.find_method(method)
