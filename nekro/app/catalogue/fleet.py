"""Reads the catalogue: the plugins of the fleet, and which workers serve which version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.plugins.entries import PluginEntry, PluginStatus
from storage.caller_reads import read_snapshots, read_workers, served_plugins

if TYPE_CHECKING:
    from storage.caller_reads import PublishedWorker, ServedPlugin, Snapshot
    from storage.engine import Database

__all__ = ["CatalogueReader", "FleetCatalogue", "ServedVersion"]

_DIGEST_CHARS: Final = 8
_NOT_LOADED: Final = (PluginStatus.FAILED, PluginStatus.STARTING)


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """One version of a plugin, and the workers that serve it."""

    entry: PluginEntry
    #: When a worker served it first.
    published_at: datetime
    #: Names of the workers, the one that started first at the beginning.
    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FleetCatalogue:
    """What the fleet serves."""

    #: Live workers; without any, the workers that were there last.
    workers: tuple[PublishedWorker, ...] = ()
    #: Whether workers are live; otherwise this is the last published catalogue, or nothing.
    is_live: bool = False
    #: Of each plugin the version that callers see, in loading order.
    plugins: tuple[PluginEntry, ...] = ()
    #: Every version by the plugin's key, the one that callers see first.
    versions: Mapping[str, tuple[ServedVersion, ...]]

    def differences(self) -> list[str]:
        """Return a line for each plugin of which workers run different files, or fail to load the same."""
        lines = []
        for key, versions in self.versions.items():
            if len(versions) > 1:
                lines += _differences(key, versions)
        return lines


class CatalogueReader:
    """Reads the catalogue from the database; keeps the entries that it has read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._entries: dict[str, tuple[PluginEntry, datetime]] = {}
        self._served: tuple[object, ...] | None = None
        self._catalogue = FleetCatalogue(versions={})

    async def read(self) -> FleetCatalogue:
        """Return the present catalogue: the same object while nothing has changed.

        Raises:
            StorageUnavailableError: the database does not answer, or is not migrated.
        """
        async with self._database.read() as transaction:
            connection = transaction.connection
            workers = await read_workers(connection)
            live = [worker for worker in workers if worker.is_live]
            shown = live or workers
            served = await served_plugins(connection, [one.id for one in shown]) if shown else []
            state = (bool(live), *(worker.id for worker in shown), *served)
            if state == self._served:
                return self._catalogue
            missing = {one.digest for one in served} - self._entries.keys()
            found = await read_snapshots(connection, sorted(missing)) if missing else []
        self._keep(found, {one.digest for one in served})
        self._catalogue = self._combined(shown, served, is_live=bool(live))
        self._served = state
        return self._catalogue

    def _keep(self, found: Sequence[Snapshot], used: set[str]) -> None:
        known = {digest: entry for digest, entry in self._entries.items() if digest in used}
        for one in found:
            assert one.published_at is not None  # noqa: S101 - it was read
            try:
                known[one.digest] = (PluginEntry.from_json(one.entry), one.published_at)
            except (ValueError, TypeError, LookupError) as exc:  # of a release with values unknown here
                logger.bind(plugin=one.plugin_key, error=str(exc)).warning("catalogue_entry_not_readable")
        self._entries = known

    def _combined(
        self, workers: Sequence[PublishedWorker], served: Sequence[ServedPlugin], *, is_live: bool
    ) -> FleetCatalogue:
        name_of = {worker.id: worker.name for worker in workers}
        by_digest: dict[str, list[str]] = {}
        # The order of the worker that started last comes first; other workers' plugins follow.
        order: dict[str, None] = {}
        started = {worker.id: number for number, worker in enumerate(workers)}
        for one in sorted(served, key=lambda one: (-started[one.worker_id], one.position)):
            if one.digest in self._entries:  # else it was deleted meanwhile
                by_digest.setdefault(one.digest, []).append(name_of[one.worker_id])
                order.setdefault(self._entries[one.digest][0].key)
        versions: dict[str, list[ServedVersion]] = {key: [] for key in order}
        for digest, names in by_digest.items():
            entry, published_at = self._entries[digest]
            versions[entry.key].append(
                ServedVersion(entry=entry, published_at=published_at, workers=tuple(reversed(names)))
            )
        sorted_versions = {
            key: tuple(sorted(found, key=_preference, reverse=True)) for key, found in versions.items()
        }
        return FleetCatalogue(
            workers=tuple(workers),
            is_live=is_live,
            plugins=tuple(found[0].entry for found in sorted_versions.values()),
            versions=sorted_versions,
        )


def _preference(version: ServedVersion) -> tuple[bool, datetime]:
    """Callers see the version that was published last, of those that loaded."""
    return bool(version.entry.methods) or version.entry.status not in _NOT_LOADED, version.published_at


def _differences(key: str, versions: Sequence[ServedVersion]) -> list[str]:
    newest, total = versions[0].entry, sum(len(version.workers) for version in versions)
    by_files: dict[str, list[str]] = {}
    for version in versions[1:]:
        if version.entry.digest != newest.digest:
            by_files.setdefault(version.entry.digest, []).extend(version.workers)
    lines = [
        f"{len(names)} of {total} workers run an older {PurePath(newest.path).name or key} ({key}, "
        f"files {digest[:_DIGEST_CHARS] or 'unknown'} instead of {newest.digest[:_DIGEST_CHARS]}): "
        f"{', '.join(names)}; restart them"
        for digest, names in by_files.items()
    ]
    lines += [
        f"{len(version.workers)} of {total} workers failed to load {key}: {version.entry.error} "
        f"({', '.join(version.workers)})"
        for version in versions[1:]
        if version.entry.status is PluginStatus.FAILED and newest.status is not PluginStatus.FAILED
    ]
    return lines
