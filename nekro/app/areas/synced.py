"""Directories of areas on a host that shares no disk with others.

Plugins get the path of a directory by a synchronous function, often on the thread of an event loop. An area
is brought when its path is first requested in a scope: a call, a job, a request to the gateway. The thread
that requests it waits once; what scopes with the same label have used is brought before the next one begins.
What a scope has changed is committed at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from loguru import logger

from broker_config.settings import Settings
from nekro.app.areas.scopes import BRING_SECONDS, AreaScope, RunUse, SyncedUse, UnscopedUses
from nekro.app.background import BackgroundLoop, Poll
from nekro.base.tasks import log_errors
from nekro.sandbox.shared import IDLE_SWEEPS
from nekro_agent import layout
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import NekroError
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.files.collection import GRACE
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.manifest import AreaLimits, Writer
from storage.files.stores.opening import open_store

__all__ = [
    "SyncedAreas",
    "bring_configs",
    "configs_place",
    "database_place",
]

T = TypeVar("T")

#: Labels whose areas are known; far more than a host has methods.
_LABELS: Final = 4096


#: The scope of this code; None outside of all.
_scope: ContextVar[AreaScope | None] = ContextVar("area_scope", default=None)


class SyncedAreas:
    """Implements ``nekro_agent.ports.FileAreas`` for files in a store."""

    is_synced: Final = True

    def __init__(
        self,
        areas: DataAreas,
        files: HostFiles,
        background: BackgroundLoop,
        settings: Settings,
        *,
        policy_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.files = files
        self.background = background
        self._areas = areas
        self._root = settings.data_dir.absolute()
        #: Returns what becomes of the directory of a plugin.
        self.policy_of = policy_of
        sandbox, uploads = settings.sandbox, settings.uploads
        self._shared = AreaLimits(
            bytes=sandbox.shared_bytes, names=sandbox.shared_files, setting="NEKRO_SANDBOX__SHARED_BYTES"
        )
        self._uploads = AreaLimits(
            bytes=uploads.chat_bytes, names=uploads.chat_names, setting="NEKRO_UPLOADS__CHAT_BYTES"
        )
        self._idle_seconds = settings.sandbox.shared_idle_seconds
        self._unscoped = UnscopedUses(self)
        #: Removes directories that this host has not used for long.
        self.host_sweep = Poll(
            background,
            self.empty_unused,
            seconds=BRING_SECONDS,
            is_needed=lambda: True,
            on_error="unused_areas_not_emptied",
        )
        self._is_closed = False
        self._follow = Poll(
            background,
            self._bring_configs,
            seconds=FRESH_SECONDS,
            is_needed=lambda: not self._is_closed,
            on_error="plugin_configs_not_brought",
        )
        #: Kinds of areas that scopes of a label have used; the label used last comes last.
        self._used: OrderedDict[str, frozenset[str]] = OrderedDict()

    def uploads_dir(self, chat_key: str) -> Path:
        """Return the directory that is mounted read-only as ``/app/uploads`` in the chat's sandboxes."""
        return self._required(self.uploads(chat_key))

    def shared_dir(self, container_key: str) -> Path:
        """Return the directory that is mounted as ``/app/shared`` in the sandbox."""
        return self._required(self.shared(container_key))

    def plugin_dir(self, plugin_key: str) -> Path:
        """Return the plugin's own directory.

        Scopes have it already if it is synced. A task that a call left running gets it here, and what it
        changes is committed as that of other code outside of scopes.
        """
        if self.policy_of(plugin_key) == "synced":
            return self._required(self.plugin(plugin_key))
        return self._areas.plugin_dir(plugin_key)

    def uploads(self, chat_key: str) -> AreaPlace:
        """Return the area of a chat's uploads."""
        directory = self._areas.uploads_path(chat_key)
        return AreaPlace(name=f"uploads/{directory.name}", directory=directory, limits=self._uploads)

    def shared(self, container_key: str) -> AreaPlace:
        """Return the area of a sandbox's shared files."""
        directory = self._areas.shared_path(container_key)
        return AreaPlace(name=f"shared/{directory.name}", directory=directory, limits=self._shared)

    def plugin(self, plugin_key: str, *, takes_over: bool = False) -> AreaPlace:
        """Return the area of a plugin's directory."""
        directory = self._areas.plugin_dir(plugin_key)
        name = f"plugin/{directory.name}"
        return AreaPlace(name=name, directory=directory, forgets=False, refuses=True, takes_over=takes_over)

    def configs_dir(self) -> Path:
        """Return the directory of the configurations of all plugins."""
        return self._required(configs_place(self._areas.configs_dir()))

    def follow_configs(self) -> None:
        """Keep the configurations equal to those of other hosts, to within a second, until the end.

        Plugins read them without a request for their directory, and people edit them.
        """
        self._follow.start()

    def answer(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work with areas or contents on the background loop, and block this thread until it is done."""
        return self.background.answer(work, seconds=BRING_SECONDS)

    @contextlib.asynccontextmanager
    async def scope(
        self,
        label: str,
        *,
        chat_key: str | None = None,
        container_key: str | None = None,
        plugin_key: str | None = None,
    ) -> AsyncIterator[AreaScope]:
        """Serve the areas that the code of a block requests, and commit its changes at the end.

        Args:
            label: what runs; areas that its earlier scopes used are brought first.
            chat_key, container_key: whose areas these are.
            plugin_key: whose code runs; its directory is brought and committed if that is its policy.

        Raises:
            ConflictError: another host has changed the same file of the plugin's directory; nothing of this
                directory was committed.
            DamagedFileError, FilesQuotaError, InvalidValueError, StorageUnavailableError: files could not be
                brought, or changes could not be committed.
        """
        scope = AreaScope(self, label)
        token = _scope.set(scope)
        try:
            used = self._used.get(label, frozenset())
            await self.bring(
                chat_key=chat_key if "uploads" in used else None,
                container_key=container_key if "shared" in used else None,
            )
            if plugin_key is not None and self.policy_of(plugin_key) == "synced":
                await scope.bring(self.plugin(plugin_key))
            try:
                yield scope
            except Exception:
                await _push_after_failure(scope)
                raise
            # Nothing is committed if the block was cancelled: its files may be incomplete.
            await scope.push()
        finally:
            self._note(label, scope.used)
            _scope.reset(token)
            await scope.close()

    @property
    def on_host(self) -> DataAreas:
        """The directories of this host as they are; nothing is brought."""
        return self._areas

    async def bring(self, *, chat_key: str | None = None, container_key: str | None = None) -> None:
        """Bring a chat's uploads and a sandbox's shared files, without blocking the loop.

        May raise as ``scope``.
        """
        scope = _open_scope()
        places = [self.uploads(chat_key)] if chat_key is not None else []
        places += [self.shared(container_key)] if container_key is not None else []
        for place in places:
            if scope is not None:
                await scope.bring(place)
            else:
                await self.background.wait(self._unscoped.bring(place))

    async def commit(self) -> None:
        """Commit what the surrounding scope has changed so far; may raise as ``scope``."""
        scope = _open_scope()
        if scope is not None:
            await scope.push()
        else:
            await self.background.wait(self._unscoped.push())

    async def close(self) -> None:
        """Commit what code outside of all scopes has changed."""
        self._is_closed = True
        await self.background.wait(self._unscoped.close())

    @contextlib.asynccontextmanager
    async def for_run(self, chat_key: str, container_key: str, *, fence: int | None) -> AsyncIterator[RunUse]:
        """Keep a chat's areas in use for a run, up to date at its begin; nothing is committed at the end.

        Args:
            fence: fencing token of the chat's lease; None: changes need no lease.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: files could not be brought.
        """
        scope = AreaScope(self, "")
        try:
            place = self.shared(container_key)
            await self._note_use(place)
            shared = await scope.bring(place)
            # Reads the name of the directory from the database; blocks.
            uploads = await scope.bring(await asyncio.to_thread(self.uploads, chat_key))
            try:
                yield RunUse(
                    shared, uploads, None if fence is None else Writer(chat_key=chat_key, fence=fence)
                )
            finally:
                with log_errors("area_use_not_noted", area=place.name):
                    await self._note_use(place)
        finally:
            await scope.close()

    async def empty_unused(self, *, unused: timedelta = GRACE) -> None:
        """Remove uploads and shared files from this host's disk that it has not used for a time."""
        for kind, parent in (
            ("uploads", layout.uploads_root(self._root)),
            ("shared", layout.shared_root(self._root)),
        ):
            if count := await self.files.empty_unused(kind, parent, unused=unused):
                logger.bind(kind=kind, count=count).info("unused_areas_emptied")

    async def _note_use(self, place: AreaPlace) -> None:
        """Let the idle time of shared files start now, as exactly as the sweep looks for idle ones."""
        if self._idle_seconds:
            work = self.files.note_use(place, seconds=self._idle_seconds / IDLE_SWEEPS)
            await self.background.wait(work)

    @contextlib.asynccontextmanager
    async def using(self, place: AreaPlace) -> AsyncIterator[SyncedUse]:
        """Keep an area in use for a block, up to date at its begin; nothing is committed at the end.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: it could not be brought.
        """
        scope = AreaScope(self, "")
        try:
            yield await scope.bring(place)
        finally:
            await scope.close()

    def prefetch(self, chat_key: str, container_key: str) -> None:
        """Bring a chat's areas in the background; the run that needs them reports failures."""
        self.background.submit(self._prefetch(chat_key, container_key))

    async def _prefetch(self, chat_key: str, container_key: str) -> None:
        with log_errors("files_not_prefetched"):
            await self._visit(self.shared(container_key))
            await self._visit(await asyncio.to_thread(self.uploads, chat_key))

    async def _visit(self, place: AreaPlace) -> None:
        async with self.files.use(place):
            pass

    async def _bring_configs(self) -> None:
        await self._unscoped.bring(configs_place(self._areas.configs_dir()))

    def _required(self, place: AreaPlace) -> Path:
        scope = _open_scope()
        if scope is not None:
            scope.require(place)
        else:
            self.background.answer(self._unscoped.bring(place), seconds=BRING_SECONDS)
        return place.directory

    def _note(self, label: str, used: frozenset[str]) -> None:
        if used:
            self._used[label] = self._used.pop(label, frozenset()) | used
            if len(self._used) > _LABELS:
                self._used.popitem(last=False)


def configs_place(directory: Path) -> AreaPlace:
    """Return the area of the plugins' configurations, which a host has in that directory."""
    return AreaPlace(name="configs", directory=directory, forgets=False, refuses=True)


def database_place(directory: Path) -> AreaPlace:
    """Return the area of the database that plugins share; only its owner uses it."""
    return AreaPlace(
        name="plugin_database", directory=directory, forgets=False, refuses=True, takes_over=True
    )


def bring_configs(settings: Settings) -> None:
    """Make the configurations of this host those of the fleet, before plugins are imported; blocks.

    Raises:
        DamagedFileError, InvalidValueError, StorageUnavailableError: they could not be brought.
    """
    database = Database(settings.database, settings.data_dir)
    background = BackgroundLoop(database)
    files = HostFiles(
        database,
        open_store(settings.files.url),
        root=layout.files_dir(settings.data_dir),
        cache_bytes=settings.files.cache_bytes,
    )

    async def bring() -> None:
        async with files.use(configs_place(layout.configs_dir(settings.data_dir))) as use:
            with log_errors("plugin_configs_not_committed"):
                await use.push()

    try:
        background.answer(bring(), seconds=BRING_SECONDS)
    finally:
        background.close()


def _open_scope() -> AreaScope | None:
    scope = _scope.get()
    return None if scope is None or scope.is_closed else scope


async def _push_after_failure(scope: AreaScope) -> None:
    try:
        await scope.push()
    except NekroError as exc:  # the caller gets the original failure
        logger.bind(label=scope.label, error=str(exc)).warning("files_of_call_not_committed")
