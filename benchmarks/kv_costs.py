"""Compare ``plugin.store`` with the bare database driver: ``python -m benchmarks.kv_costs --help``.

The same statements on the same database file or server: as a plugin's coroutine runs them, through
``plugin.store`` in its greenlet, and on one persistent connection of aiosqlite or psycopg with the same
settings, with a commit for each write. The two alternate; ratios are computed within each repetition.
Needs no broker.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import aiosqlite
import psycopg
import uvloop
from sqlalchemy import Dialect
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite

from benchmarks.harness.figures import Spread, spread
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from broker_config.settings import DatabaseSettings, StoreSettings
from nekro_agent import runtime
from nekro_agent.execution.greenlets import Bridged
from nekro_agent.store import PluginStore
from nekro_agent.testing.services import RecordedTriggers
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.kv import SqlKeyValueStore
from storage.migrate import upgrade
from storage.repositories.plugin_states import GET, SET
from workers.sdk_runtime import SqlMessages

__all__ = ["main", "parse"]

_PLUGIN: Final = "bench.kv"
_CHAT: Final = "chat"
_VALUE: Final = "v" * 100
_KEYS: Final = 50
_SYNCHRONOUS: Final[tuple[Literal["normal", "full"], ...]] = ("normal", "full")
_LIBRARIES: Final = ("aiosqlite", "greenlet", "psycopg", "sqlalchemy", "uvloop")

_Operation = Callable[[], Awaitable[object]]
_Fetch = Callable[[Any, str, Any], Awaitable[Any]]


class Plugin:
    """Reads and writes values as a plugin does."""

    def __init__(self) -> None:
        self._store = PluginStore(_PLUGIN)
        self._numbers = itertools.count()

    async def get(self) -> None:
        """Read one of the keys."""
        await self._store.get(_CHAT, "", str(next(self._numbers) % _KEYS))

    async def set(self) -> None:
        """Write one of the keys."""
        await self._store.set(_CHAT, "", str(next(self._numbers) % _KEYS), _VALUE)


class Bare:
    """Reads and writes the same rows with the bare driver, on one persistent connection."""

    def __init__(self, connection: Any, fetch: _Fetch, dialect: Dialect) -> None:
        self._connection = connection
        self._fetch = fetch
        self._get, self._set = GET.compiled(dialect), SET.compiled(dialect)
        self._of_get: list[Any] = []
        self._of_set: list[Any] = []
        self._numbers = itertools.count()

    async def prepare(self) -> None:
        """Read the rows that the plugin wrote, for the parameters of the statements."""
        names = ("digest", "plugin_key", "chat_key", "user_key", "store_key", "value")
        query = f"SELECT {', '.join(names)} FROM plugin_values WHERE plugin_key = '{_PLUGIN}'"
        for row in await self._fetch(self._connection, query, ()):
            values = dict(zip(names, row, strict=True))
            self._of_get.append(self._get.parameters({"of_digest": values["digest"]}))
            self._of_set.append(self._set.parameters(values))

    async def get(self) -> None:
        """Read one of the keys."""
        await self._fetch(self._connection, self._get.sql, self._of_get[next(self._numbers) % _KEYS])

    async def set(self) -> None:
        """Write one of the keys."""
        await self._fetch(self._connection, self._set.sql, self._of_set[next(self._numbers) % _KEYS])

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()


async def _bare(database: Database) -> Bare:
    if database.is_sqlite:
        connection: Any = await aiosqlite.connect(str(database.url.database), isolation_level=None)
        for pragma in ("journal_mode = WAL", f"synchronous = {database.settings.sqlite_synchronous.upper()}"):
            await connection.execute_fetchall(f"PRAGMA {pragma}")
        return Bare(connection, aiosqlite.Connection.execute_fetchall, SQLiteDialect_aiosqlite())
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)

    async def fetch(connection: Any, sql: str, parameters: Any) -> Any:
        return await (await connection.execute(sql, parameters)).fetchall()

    return Bare(connection, fetch, PGDialectAsync_psycopg())


async def _measure(
    name: str, settings: DatabaseSettings, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Print the rows of one database; returns the ratio of each repetition by operation."""
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        await upgrade(settings, Path(directory))
        database = Database(settings, Path(directory))
        store = SqlKeyValueStore(database, StoreSettings())
        await store.purge(_PLUGIN)
        services = runtime.Runtime(
            data_dir=Path(directory),
            store=store,
            messages=SqlMessages(database, RecordedTriggers()),
            areas=DataAreas(Path(directory)),
        )
        with runtime.bound(services):
            plugin = Plugin()
            for _ in range(_KEYS):
                await plugin.set()
            bare = await _bare(database)
            await bare.prepare()
            for operation, ours, theirs in (("get", plugin.get, bare.get), ("set", plugin.set, bare.set)):
                ratios |= await _compare(f"{name} {operation}", ours, theirs, options)
            await bare.close()
        await store.purge(_PLUGIN)
        await database.dispose()
    return ratios


async def _compare(
    name: str, ours: _Operation, bare: _Operation, options: argparse.Namespace
) -> dict[str, list[float]]:
    found = {}
    for title, measure in (("one by one", _one_by_one), (f"{options.at_once} at once", _at_once)):
        pairs = [await Bridged(measure(ours, bare, options)) for _ in range(options.repetitions)]
        found[f"{name}, {title}"] = [own / other for own, other in pairs]
        ratio = _text(spread(found[f"{name}, {title}"]), 1, 2)
        own, other = (_text(spread(column), 1e6, 0) for column in zip(*pairs, strict=True))
        print(f"{name:20} {title:14} {ratio:18} {own:22} {other}")
    return found


async def _one_by_one(ours: _Operation, bare: _Operation, options: argparse.Namespace) -> tuple[float, float]:
    """Return the median seconds of both; alternating, so that both find the same state of the caches."""
    seconds: dict[_Operation, list[float]] = {ours: [], bare: []}
    for _ in range(options.count):
        for operation, taken in seconds.items():
            started = time.perf_counter()
            await operation()
            taken.append(time.perf_counter() - started)
    return statistics.median(seconds[ours]), statistics.median(seconds[bare])


async def _at_once(ours: _Operation, bare: _Operation, options: argparse.Namespace) -> tuple[float, float]:
    """Return the total seconds divided by the number of operations, for both."""
    seconds = []
    for operation in (ours, bare):
        started = time.perf_counter()
        await asyncio.gather(*(operation() for _ in range(options.at_once)))
        seconds.append((time.perf_counter() - started) / options.at_once)
    return seconds[0], seconds[1]


def _text(value: Spread | None, scale: float, digits: int) -> str:
    if value is None:
        return "-"
    return "{} ({}–{})".format(
        *(f"{part * scale:.{digits}f}" for part in (value.median, value.low, value.high))
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_costs", description=__doc__)
    parser.add_argument("--url", help="also measure this database, for example postgresql://host/scratch")
    parser.add_argument("--count", type=int, default=300, help="operations one by one (default: 300)")
    parser.add_argument("--at-once", type=int, default=1000, help="operations at once (default: 1000)")
    parser.add_argument("--repetitions", type=int, default=9, help="repetitions of all figures (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    interrupted_by_sigterm()
    options = parse(argv)
    databases = {f"sqlite {how}": DatabaseSettings(sqlite_synchronous=how) for how in _SYNCHRONOUS}
    if options.url:
        databases[options.url.split(":")[0]] = DatabaseSettings(url=options.url)
    machine = describe_machine("")
    print("plugin.store / bare driver within each repetition, microseconds each: median (least–greatest)")
    print(f"{'database':20} {'':14} {'ratio':18} {'plugin.store us':22} bare driver us")
    ratios: dict[str, list[float]] = {}
    for name, settings in databases.items():
        ratios |= uvloop.run(_measure(name, settings, options))
    print(
        f"{machine.cores} cores ({machine.cpu}), {machine.kernel}, {machine.python},"
        f" SQLite {sqlite3.sqlite_version}, load {machine.load_1m:.2f} at the start"
    )
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES))
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": ratios}) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
