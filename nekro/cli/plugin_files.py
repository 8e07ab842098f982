"""Write the plugin and the test of `nekro plugins new`; find and delete the data of a plugin."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker_config.settings import Settings
from nekro_agent import layout
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from storage.engine import Database

__all__ = [
    "PluginData",
    "find_data",
    "purge",
    "write_plugin",
]


#: Names that plugin discovery or pytest reserves.
_TAKEN: Final = frozenset({"plugin", "conftest", "nekro_agent", "tests", "test"})


def write_plugin(name: str, directory: Path) -> list[Path]:
    """Write ``<name>.py`` and ``test_<name>.py``; returns their paths.

    Raises:
        UsageError: the name is not usable for a module, or one of the files exists.
    """
    _check(name)
    title = name.replace("_", " ").capitalize()
    files = {
        directory / f"{name}.py": _PLUGIN.format(name=name, title=title),
        directory / f"test_{name}.py": _TEST.format(name=name),
    }
    for path in files:
        if path.exists():
            raise UsageError(f"{path} exists; choose another name or folder")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, "utf-8")
    return list(files)


def _check(name: str) -> None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is not a module name; use letters, digits and _, as in `new weather`")
    if name.startswith(("_", "test_")) or name in _TAKEN:
        raise UsageError(f"{name!r} is a reserved name, which plugin discovery skips; choose another name")
    if name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is a standard library module, which hides the plugin; choose another name"
        )


_PLUGIN: Final = '''"""{title}: describe the plugin here; models and people read it."""

from nekro_agent.api.plugin import ConfigBase, NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from pydantic import Field

plugin = NekroPlugin(
    name="{title}",
    module_name="{name}",
    description="Says what the plugin does.",
    version="0.1.0",
    author="you",
    url="",
)


@plugin.mount_config()
class Config(ConfigBase):
    """Settings of the plugin, kept in a YAML file that people may edit."""

    GREETING: str = Field(default="Hello", description="How a greeting begins.")


@plugin.mount_sandbox_method(SandboxMethodType.TOOL, "greet_{name}", "Greets a person")
async def greet_{name}(_ctx: AgentCtx, name: str) -> str:
    """Greet a person; the model reads this text to learn how to call the method.

    Args:
        name: whom to greet.

    Returns:
        The greeting, with how many of them this chat has had.
    """
    config = plugin.get_config(Config)
    count = int(await plugin.store.get(chat_key=_ctx.chat_key, store_key="count") or 0) + 1
    await plugin.store.set(chat_key=_ctx.chat_key, store_key="count", value=str(count))
    return f"{{config.GREETING}}, {{name}}! (greeting {{count}})"
'''

_TEST: Final = '''"""Tests of the {name} plugin. `pytest` runs them; no worker or database is needed."""

import asyncio

from nekro_agent.testing import InMemoryRuntime

from {name} import plugin


def test_greetings_are_counted_per_chat(tmp_path):
    async def scene():
        async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
            first = await world.call("greet_{name}", "Ada", chat_key="group_1")
            second = await world.call("greet_{name}", name="Bob", chat_key="group_1")
            elsewhere = await world.call("greet_{name}", "Ada", chat_key="group_2")
        assert first.value == "Hello, Ada! (greeting 1)"
        assert second.value == "Hello, Bob! (greeting 2)"
        assert elsewhere.value == "Hello, Ada! (greeting 1)"

    asyncio.run(scene())
'''


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
    #: What the store has, where hosts share no disk: paths by area.
    stored: dict[str, list[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.values or self.files or self.stored or _lies_at(self.directory) or _lies_at(self.config)
        )

    def __str__(self) -> str:
        parts = [f"{self.values} stored values"]
        if _lies_at(self.directory):
            parts.append(f"{self.directory} ({self.files} files)")
        if _lies_at(self.config):
            parts.append(str(self.config))
        if self.stored:
            parts.append(f"{sum(map(len, self.stored.values()))} files and directories of the store")
        return ", ".join(parts)


async def find_data(settings: Settings, plugin_key: str) -> PluginData:
    """Find the data of a plugin, whether or not it is installed.

    Raises:
        UsageError: ``plugin_key`` is not a plugin key.
        StorageUnavailableError: the database does not answer or is not migrated.
    """
    if not _KEY.fullmatch(plugin_key):
        raise UsageError(f"{plugin_key!r} is not a plugin key; write author.module, as `nekro plugins` lists")
    from nekro.cli.local_api import open_database
    from storage.kv import SqlKeyValueStore

    async with open_database(settings) as database:
        values = await SqlKeyValueStore(database, settings.store).count(plugin_key)
        stored = await _stored(database, settings, plugin_key)
    directory = layout.plugin_dir(settings.data_dir, plugin_key)
    return PluginData(
        plugin_key=plugin_key,
        values=values,
        directory=directory,
        config=layout.config_file(settings.data_dir, plugin_key),
        files=0 if directory.is_symlink() else sum(not path.is_dir() for path in directory.rglob("*")),
        stored=stored,
    )


async def _stored(database: Database, settings: Settings, plugin_key: str) -> dict[str, list[str]]:
    if not settings.files.in_store:
        return {}
    directory, config = (of(Path(), plugin_key) for of in (layout.plugin_dir, layout.config_file))
    found: dict[str, list[str]] = {}
    async with database.read() as tx:
        for name, only in ((f"plugin/{directory.name}", None), ("configs", config.name)):
            area = await tx.files.find(name)
            entries = [] if area is None else await tx.files.entries(area)
            if paths := [entry.path for entry in entries if only in (None, entry.path)]:
                found[name] = paths
    return found


async def purge(settings: Settings, data: PluginData) -> None:
    """Delete the data. Where the directory is a symbolic link, the link is deleted and its target kept.

    What is in a store is deleted from its areas, so other hosts delete their copies when they next use them.

    Raises:
        StorageUnavailableError: the database does not answer; nothing was deleted.
        OSError: a file cannot be deleted; the values are gone.
    """
    from storage.engine import Database
    from storage.kv import SqlKeyValueStore

    async with Database(settings.database, settings.data_dir) as database:
        await SqlKeyValueStore(database, settings.store).purge(data.plugin_key)
        for name, paths in data.stored.items():
            async with database.begin() as tx:
                await tx.files.commit(name, removed=paths)
    if data.directory.is_symlink():
        data.directory.unlink()
    elif data.directory.exists():
        shutil.rmtree(data.directory)
    data.config.unlink(missing_ok=True)


def _lies_at(path: Path) -> bool:
    return path.exists() or path.is_symlink()
