"""Reads the catalogue: the plugins of the fleet, their commands, and which workers serve which version.

Beside it are the built-in methods, which every chat's code has without a plugin, and the lane overrides of
methods, which the watchdog or an operator writes and callers read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.plugins.entries import CommandEntry, MethodEntry, PluginEntry, PluginStatus
from nekro.plugins.entry_registry import CommandNames, Named, Registry
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.methods import BUILT_IN_METHODS, BUILT_IN_PLUGIN, WAIT_METHODS, Lane, SandboxMethodType
from storage.caller_reads import lane_overrides, read_snapshots, read_workers, served_plugins

if TYPE_CHECKING:
    from nekro.plugins.lanes import LaneChooser
    from storage.caller_reads import LaneOverride, PublishedWorker, ServedPlugin, Snapshot
    from storage.engine import Database

__all__ = [
    "BUILT_IN_TASKS",
    "WAIT_TASKS",
    "CatalogueReader",
    "FleetCatalogue",
    "LaneOverrides",
    "ServedVersion",
    "built_in_entries",
    "built_in_entry",
    "command_names",
    "is_command",
    "listed_commands",
]


_DIGEST_CHARS: Final = 8

_NOT_LOADED: Final = (PluginStatus.FAILED, PluginStatus.STARTING)
_SERVED: Final = "this is what the last ones served"
_NOT_SERVED: Final = (
    "start `nekro worker --lane methods`; `nekro plugins --load` lists the plugins of this host"
)


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """One version of a plugin, and the workers that serve it."""

    entry: PluginEntry
    #: When a worker served it first.
    published_at: datetime
    #: Names of the workers, in the order of their starts.
    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FleetCatalogue:
    """What the fleet serves."""

    #: Live workers; without any, the workers that were there last.
    workers: tuple[PublishedWorker, ...] = ()
    #: Whether workers are live; otherwise this is the last published catalogue, or nothing.
    is_live: bool = False
    #: The version of each plugin that callers see, in loading order.
    plugins: tuple[PluginEntry, ...] = ()
    #: Every version by the plugin's key, the one that callers see first.
    versions: Mapping[str, tuple[ServedVersion, ...]]
    #: Settings without effect, if this process imported the plugins.
    warnings: tuple[str, ...] = ()
    #: What it is while no worker is live.
    note: str = _NOT_SERVED

    def differences(self) -> list[str]:
        """Return a line for each plugin that differs between workers, or that some of them failed to load."""
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
            note=_SERVED if sorted_versions else _NOT_SERVED,
        )


def _preference(version: ServedVersion) -> tuple[bool, datetime]:
    """Sort key of the version that callers see: the newest one that loaded."""
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


def command_names(registry: Registry) -> CommandNames[CommandEntry]:
    """Index the commands of the registry's plugins."""
    return CommandNames(
        [
            Named(entry=one, plugin_key=one.plugin_key, name=one.name, aliases=one.aliases)
            for one in _commands(registry)
        ],
        is_enabled=registry.is_enabled,
    )


def is_command(line: str) -> bool:
    """Whether a line is a command; any other line is the answer to the question of one."""
    return line.lstrip().startswith("/")


def listed_commands(registry: Registry) -> list[CommandEntry]:
    """Return the commands that users may run."""
    return [one for one in _commands(registry) if registry.is_enabled(one.plugin_key) and not one.internal]


def _commands(registry: Registry) -> Iterable[CommandEntry]:
    return [command for plugin in registry.plugins for command in plugin.commands]


#: The methods by Celery task.
BUILT_IN_TASKS: Final = {f"{BUILT_IN_PLUGIN}.{name}": method for name, method in BUILT_IN_METHODS.items()}

#: Those whose callers wait without a process.
WAIT_TASKS: Final = frozenset(f"{BUILT_IN_PLUGIN}.{name}" for name in WAIT_METHODS)


def built_in_entry(task: str, *, in_round: bool) -> MethodEntry | None:
    """Return a built-in method for the code of a round, or for other code; None if no task has that name.

    Outside of rounds nothing is gained by a follow-up round: the code gets the text of AGENT methods.
    """
    method = BUILT_IN_TASKS.get(task)
    if method is None:
        return None
    is_value = method.type.wakes_agent and not in_round
    return MethodEntry(
        name=method.name,
        task=task,
        plugin_key=BUILT_IN_PLUGIN,
        label=method.name,
        type=SandboxMethodType.TOOL if is_value else method.type,
        signature=method.signature,
        doc=method.doc,
        lane=Lane.METHODS,
        once=task in WAIT_TASKS,
    )


def built_in_entries(*, in_round: bool) -> list[MethodEntry]:
    """Return the built-in methods for the code of a round, or for other code."""
    entries = (built_in_entry(task, in_round=in_round) for task in BUILT_IN_TASKS)
    return [entry for entry in entries if entry is not None]


class LaneOverrides:
    """The overrides of the database, and this process's copy of them."""

    def __init__(
        self,
        database: Database,
        lanes: LaneChooser,
        *,
        on_pinned: Callable[[Iterable[str]], None],
    ) -> None:
        """Create the copy, without overrides.

        Args:
            on_pinned: called with the keys of plugins that overrides pin, before calls are routed so.
        """
        self._on_pinned = on_pinned
        self._database = database
        self._lanes = lanes
        self._read_at: float | None = None
        #: By task, or by key of a plugin, as they were read last.
        self.current: Mapping[str, LaneOverride] = {}

    async def refresh(self, *, at_once: bool = False) -> None:
        """Read the overrides of the database; routes stay unchanged while the database is unavailable.

        Args:
            at_once: read them also if they were read within a second.
        """
        now = time.monotonic()
        if not at_once and self._read_at is not None and now - self._read_at < FRESH_SECONDS:
            return
        self._read_at = now
        try:
            async with self._database.read() as transaction:
                overrides = await lane_overrides(transaction.connection)
        except StorageError as exc:
            logger.bind(error=str(exc)).warning("lane_overrides_not_read")
            return
        self.current = overrides
        lanes = {name: override.lane for name, override in overrides.items()}
        self._on_pinned(name for name, lane in lanes.items() if lane == Lane.PINNED.value)
        self._lanes.update_overrides(lanes)

    async def pin_plugin(self, plugin_key: str, *, reason: str) -> bool:
        """Pin a plugin to one process from now on; False when an operator decided otherwise."""
        async with self._database.autocommit() as transaction:
            is_pinned = await transaction.lane_overrides.set_by_watchdog(
                plugin_key, lane=Lane.PINNED, reason=reason
            )
        await self.refresh(at_once=True)
        return is_pinned
