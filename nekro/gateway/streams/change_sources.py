"""What no event announces: lists of which a gateway reads fingerprints while a reader follows them.

A fingerprint differs when something that the list shows has changed; ``None`` stands for the whole list, a
chat's key for the part of a chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Final

from nekro.app.composition import Services
from nekro.broker.broker_figures import dead_mark, read_queues
from nekro_client.models import ChangeKind
from storage.listings.overview import OverviewRepository

__all__ = ["SOURCES", "Marks"]

#: Fingerprints by chat key; None: of all.
Marks = Mapping[str | None, Hashable]


async def _timers(services: Services) -> Marks:
    async with services.database.read() as transaction:
        found = await transaction.change_listing.timers()
    return {chat_key: mark for chat_key, mark in found.items()}


async def _approvals(services: Services) -> Marks:
    async with services.database.read() as transaction:
        found = await transaction.change_listing.approvals()
    return {chat_key: mark for chat_key, mark in found.items()}


async def _jobs(services: Services) -> Marks:
    async with services.database.read() as transaction:
        return {None: await transaction.change_listing.jobs()}


async def _workers(services: Services) -> Marks:
    catalogue = await services.read_catalogue()
    async with services.database.read() as transaction:
        running = await transaction.worker_listing.running()
    live = frozenset((one.id, one.is_live) for one in catalogue.workers)
    return {None: (live, *(frozenset(counts.items()) for counts in running))}


async def _queues(services: Services) -> Marks:
    figures = await asyncio.to_thread(read_queues, services.app)
    async with services.database.read() as transaction:
        overview = OverviewRepository(transaction.connection)
        work = [await overview.rounds(), await overview.jobs()]
    # The age of the oldest item grows without a change.
    waiting = frozenset((one.lane, one.waiting, one.held) for one in figures)
    return {None: (waiting, *((one.waiting, one.running) for one in work))}


async def _dead_letters(services: Services) -> Marks:
    return {None: await asyncio.to_thread(dead_mark, services.app)}


async def _plugins(services: Services) -> Marks:
    catalogue = await services.read_catalogue()
    versions = frozenset(
        (key, version.published_at, version.workers)
        for key, found in catalogue.versions.items()
        for version in found
    )
    async with services.database.read() as transaction:
        return {None: (versions, await transaction.change_listing.plugins())}


async def _mcp_servers(services: Services) -> Marks:
    async with services.database.read() as transaction:
        return {None: await transaction.change_listing.mcp_servers()}


async def _keys(services: Services) -> Marks:
    async with services.database.read() as transaction:
        return {None: await transaction.change_listing.keys()}


async def _costs(services: Services) -> Marks:
    async with services.database.read() as transaction:
        return {None: await transaction.change_listing.costs()}


async def _audit(services: Services) -> Marks:
    async with services.database.read() as transaction:
        return {None: await transaction.change_listing.audit()}


SOURCES: Final[Mapping[ChangeKind, Callable[[Services], Awaitable[Marks]]]] = {
    ChangeKind.APPROVALS: _approvals,
    ChangeKind.TIMERS: _timers,
    ChangeKind.JOBS: _jobs,
    ChangeKind.WORKERS: _workers,
    ChangeKind.QUEUES: _queues,
    ChangeKind.DEAD_LETTERS: _dead_letters,
    ChangeKind.PLUGINS: _plugins,
    ChangeKind.MCP_SERVERS: _mcp_servers,
    ChangeKind.KEYS: _keys,
    ChangeKind.COSTS: _costs,
    ChangeKind.AUDIT: _audit,
}
