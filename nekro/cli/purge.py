"""Find and delete the data of a plugin: stored values, files, configuration."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import Settings
from nekro_agent import layout
from nekro_agent.errors import UsageError

__all__ = ["PluginData", "find_data", "purge"]

_KEY: Final = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PluginData:
    """The stored data of a plugin; false when there is none."""

    plugin_key: str
    values: int
    directory: Path
    config: Path
    #: Files below ``directory``.
    files: int

    def __bool__(self) -> bool:
        return bool(self.values or self.files or _lies_at(self.directory) or _lies_at(self.config))

    def __str__(self) -> str:
        parts = [f"{self.values} stored values"]
        if _lies_at(self.directory):
            parts.append(f"{self.directory} ({self.files} files)")
        if _lies_at(self.config):
            parts.append(str(self.config))
        return ", ".join(parts)


async def find_data(settings: Settings, plugin_key: str) -> PluginData:
    """Find the data of a plugin, whether or not it is installed.

    Raises:
        UsageError: ``plugin_key`` is not a plugin key.
        StorageUnavailableError: the database does not answer or is not migrated.
    """
    if not _KEY.fullmatch(plugin_key):
        raise UsageError(f"{plugin_key!r} is not a plugin key; write author.module, as `nekro plugins` lists")
    from nekro.cli.services.database import open_database
    from storage.kv import SqlKeyValueStore

    async with open_database(settings) as database:
        values = await SqlKeyValueStore(database, settings.store).count(plugin_key)
    directory = layout.plugin_dir(settings.data_dir, plugin_key)
    return PluginData(
        plugin_key=plugin_key,
        values=values,
        directory=directory,
        config=layout.config_file(settings.data_dir, plugin_key),
        files=0 if directory.is_symlink() else sum(not path.is_dir() for path in directory.rglob("*")),
    )


async def purge(settings: Settings, data: PluginData) -> None:
    """Delete the data. Where the directory is a symbolic link, the link is deleted and its target kept.

    Raises:
        StorageUnavailableError: the database does not answer; nothing was deleted.
        OSError: a file cannot be deleted; the values are gone.
    """
    from storage.engine import Database
    from storage.kv import SqlKeyValueStore

    async with Database(settings.database, settings.data_dir) as database:
        await SqlKeyValueStore(database, settings.store).purge(data.plugin_key)
    if data.directory.is_symlink():
        data.directory.unlink()
    elif data.directory.exists():
        shutil.rmtree(data.directory)
    data.config.unlink(missing_ok=True)


def _lies_at(path: Path) -> bool:
    return path.exists() or path.is_symlink()
