"""Kinds of changes: who may follow each, the hints that wait for a reader, and lists without events.

A gateway reads the fingerprints of such lists while a reader follows them. A fingerprint differs when
something that the list shows has changed; ``None`` stands for the whole list, a chat's key for the part of a
chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from nekro.app.services import Services
from nekro.broker.broker_figures import dead_mark, read_queues
from nekro.operations.actor import Identity, Scope
from nekro.wire.plain_json import json_text
from nekro_client.models import Change, ChangeKind

__all__ = [
    "SOURCES",
    "ChangeReader",
    "Hint",
    "Marks",
    "kinds_of",
]


#: Most different hints that wait for one reader; above that it gets the hint ``reset``.
_MOST_WAITING: Final = 1_000
#: A key needs one of these scopes to follow a kind, as for the list of that name.
_SCOPES: Final[Mapping[ChangeKind, frozenset[Scope]]] = {
    ChangeKind.CHATS: frozenset({Scope.READ}),
    ChangeKind.TURNS: frozenset({Scope.READ}),
    ChangeKind.JOBS: frozenset({Scope.READ, Scope.ADMIN}),
    ChangeKind.APPROVALS: frozenset({Scope.READ, Scope.APPROVE}),
    ChangeKind.TIMERS: frozenset({Scope.ADMIN}),
    ChangeKind.PLUGINS: frozenset({Scope.CALL, Scope.RUN, Scope.ADMIN}),
}
#: Kinds that only a key for all chats and users may follow.
_OF_FLEET: Final = frozenset(
    {
        ChangeKind.WORKERS,
        ChangeKind.QUEUES,
        ChangeKind.DEAD_LETTERS,
        ChangeKind.MCP_SERVERS,
        ChangeKind.KEYS,
        ChangeKind.COSTS,
        ChangeKind.AUDIT,
    }
)


class Hint(NamedTuple):
    """One change: its kind and its chat."""

    kind: ChangeKind
    #: None: of no chat, or of any.
    chat_key: str | None = None


def kinds_of(identity: Identity) -> frozenset[ChangeKind]:
    """Return the kinds that an identity may follow, of its chats."""
    own = {kind for kind, scopes in _SCOPES.items() if scopes & identity.scopes}
    if Scope.ADMIN in identity.scopes and identity.is_of_all_chats and identity.user_id is None:
        own |= _OF_FLEET
    return frozenset(own)


class ChangeReader:
    """One reader's hints, each once; a reader that takes none costs no more than these."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.kinds = kinds_of(identity)
        self._waiting: dict[Hint, None] = {}
        self._is_reset = False
        self._woken = asyncio.Event()
        #: Whether its key is no longer valid, or the gateway stops.
        self.is_ended = False

    def add(self, hints: Iterable[Hint]) -> None:
        """Let the hints that concern the reader wait for it."""
        added = [hint for hint in hints if self._concerns(hint)]
        if added and not self._is_reset:
            self._waiting.update(dict.fromkeys(added))
            if len(self._waiting) > _MOST_WAITING:
                self.reset()
            self._woken.set()

    def reset(self) -> None:
        """Replace the waiting hints by the hint to read everything again."""
        self._is_reset = True
        self._waiting.clear()
        self._woken.set()

    def end(self) -> None:
        """End the reader's stream."""
        self.is_ended = True
        self._woken.set()

    async def wait(self) -> None:
        """Wait until there is something to take, or for the end."""
        await self._woken.wait()
        self._woken.clear()

    def take(self, position: str) -> bytes:
        """Return what waits as server-sent events, and forget it; nothing waits: b"".

        Args:
            position: id of the last one, after which the reader resumes.
        """
        waiting, self._waiting = self._waiting, {}
        if self._is_reset:
            self._is_reset = False
            waiting = {Hint(ChangeKind.RESET): None}
        if not waiting:
            return b""
        *others, last = map(_frame, waiting)
        # Only with the last one, because the others have not been sent before it.
        return b"".join(others) + f"id: {position}\r\n".encode() + last

    def _concerns(self, hint: Hint) -> bool:
        if hint.kind not in self.kinds:
            return False
        if hint.chat_key is not None:
            return self.identity.is_of_all_chats or self.identity.has_chat(hint.chat_key)
        return self.identity.is_of_all_chats or hint.kind is ChangeKind.PLUGINS


@lru_cache(4_096)
def _frame(hint: Hint) -> bytes:
    """Return a hint as a server-sent event; readers share it."""
    data = json_text(Change(kind=hint.kind, chat_key=hint.chat_key))
    return f"event: {'reset' if hint.kind is ChangeKind.RESET else 'change'}\r\ndata: {data}\r\n\r\n".encode()


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
        overview = transaction.overview
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
