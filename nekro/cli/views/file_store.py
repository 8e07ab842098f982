"""`nekro files fsck` and `import`: check the store of files, and move the files of a data directory there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.embedded import make_data_dir, resolve_settings
from broker_config.settings import Settings
from nekro.cli.api import is_over_gateway
from nekro.cli.command import Deps
from nekro.cli.running import ExitCode
from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, UsageError

if TYPE_CHECKING:
    from storage.engine import Database
    from storage.files.host_files import AreaPlace, HostFiles

__all__ = ["check_store", "import_files"]

#: How long a check repeats a request: a person waits for it, so it gives up sooner than a run.
_PATIENCE: Final = timedelta(seconds=30)


async def check_store(deps: Deps, *, reads: bool, repairs: bool, as_json: bool) -> int:
    """Compare the store with what the files need; returns the exit code.

    Args:
        reads: compare the bytes of each object, otherwise its size.
        repairs: let hosts store altered and lost contents again.
    """
    from storage.files.collection import check
    from storage.files.stores.opening import open_store

    async with _opened(deps) as (settings, database):
        store = open_store(settings.files.url, patience=_PATIENCE)
        result = await check(database, store, reads=reads, repairs=repairs)
    if as_json:
        deps.output.json(asdict(result))
    else:
        rows = [
            (damage.sha256[:16], damage.found, file)
            for damage in result.damages
            for file in damage.files or ("(no file needs it)",)
        ]
        if rows:
            deps.output.table(("CONTENT", "FOUND", "FILE"), rows)
        deps.output.words(f"checked {result.contents} contents: {len(result.damages)} damaged")
    return ExitCode.FAILED if result.damages else ExitCode.OK


async def import_files(deps: Deps, *, as_json: bool) -> int:
    """Copy directories of the data directory that the store lacks; returns the exit code.

    Each becomes the first version of its area at once. What the store has already is left as it is there, so
    a repetition continues where the last attempt ended.
    """
    from storage.files.host_files import HostFiles
    from storage.files.paths import checked_path
    from storage.files.stores.opening import open_store

    imported, known, left_out = 0, 0, dict[str, str]()
    async with _opened(deps) as (settings, database):
        files = HostFiles(
            database,
            open_store(settings.files.url),
            root=layout.files_dir(settings.data_dir),
            cache_bytes=settings.files.cache_bytes,
        )
        places, kept = await _plugin_places(settings)
        left_out |= kept
        for place in [*_places(settings), *places]:
            try:
                checked_path(place.name)
            except InvalidValueError as exc:
                left_out[_shown(place.name)] = str(exc)
                continue
            reasons = await _import(database, files, place)
            if reasons is None:
                known += 1
                continue
            imported += 1
            left_out |= {f"{place.name}/{path}": reason for path, reason in reasons.items()}
    if as_json:
        deps.output.json({"imported": imported, "known": known, "left_out": left_out})
        return ExitCode.OK
    if left_out:
        deps.output.table(("LEFT OUT", "REASON"), sorted(left_out.items()))
    deps.output.words(f"imported {imported} directories; the store had {known}; nothing was deleted here")
    return ExitCode.OK


@contextlib.asynccontextmanager
async def _opened(deps: Deps) -> AsyncIterator[tuple[Settings, Database]]:
    from storage.engine import Database
    from storage.migrate import require_schema

    if is_over_gateway():
        raise UsageError("the store of files is checked where its settings are; unset NEKRO_URL there")
    settings = resolve_settings(deps.load_settings())
    if not settings.files.in_store:
        raise UsageError("the files are in the data directory; NEKRO_FILES__URL names no store")
    make_data_dir(settings)
    async with Database(settings.database, settings.data_dir) as database:
        await require_schema(database)
        yield settings, database


def _places(settings: Settings) -> list[AreaPlace]:
    from nekro.app.areas.synced import configs_place, database_place

    of_plugins = (
        configs_place(layout.configs_dir(settings.data_dir)),
        database_place(layout.plugin_database(settings.data_dir).parent),
    )
    return [
        *(place for place in of_plugins if place.directory.is_dir()),
        *_below("uploads", layout.uploads_root(settings.data_dir)),
        *_below("shared", layout.shared_root(settings.data_dir)),
    ]


async def _plugin_places(settings: Settings) -> tuple[list[AreaPlace], dict[str, str]]:
    """Return the directories of plugins whose policy is to store them, and the others with the reason.

    Raises:
        ServiceError: the plugins cannot be imported, on which the policies depend.
    """
    found = _below("plugin", layout.plugins_root(settings.data_dir))
    if not found:
        return [], {}
    from nekro.cli.views.catalogue import CatalogueServices

    catalogue = await CatalogueServices(settings, of_this_host=True).read_catalogue()
    policies = {layout.encode_key(plugin.key): plugin for plugin in catalogue.plugins}
    places, kept = [], dict[str, str]()
    for place in found:
        plugin = policies.get(place.directory.name)
        if plugin is None or not plugin.files:
            kept[_shown(place.name)] = "no plugin of this key is loaded here"
        elif plugin.files in _STORED:
            places.append(place)
        else:
            kept[_shown(place.name)] = f"{plugin.files}: {plugin.files_reason}"
    return places, kept


#: Policies of plugins' directories that the store has: ``nekro.plugins.data_dirs.DirectoryPolicy``.
_STORED: Final = ("synced", "pinned")


def _below(kind: str, root: Path) -> list[AreaPlace]:
    from storage.files.host_files import AreaPlace

    with contextlib.suppress(FileNotFoundError):
        return [
            AreaPlace(name=f"{kind}/{directory.name}", directory=directory, forgets=False)
            for directory in sorted(root.iterdir())
            if directory.is_dir() and not directory.is_symlink()
        ]
    return []


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


async def _import(database: Database, files: HostFiles, place: AreaPlace) -> dict[str, str] | None:
    """Make the first version of an area; returns reasons by path of what it lacks, None if it exists."""
    async with database.read() as tx:
        if await tx.files.find(place.name) is not None:
            return None
    async with files.use(place) as use:
        return (await use.push()).left_out
