"""Measure files in a store whose manifest has a million of them: ``python -m benchmarks.many_files --help``.

Three chats have 10, 1,000 and 10,000 files; the others are in areas of 10,000 files. Each step runs in a
process of its own, which is forked from one that has measured nothing, so its memory is that of the step.
Objects are made up instead of read, so the figures have no network; a listing reads all keys from a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.postgres_server import postgres_server
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.usage import tree_cpu_seconds
from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.files.collection import collect
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.manifest import Entry
from storage.files.stores.store import StoredObject
from storage.migrate import upgrade

__all__ = ["main", "parse"]

_CHATS: Final = (10, 1_000, 10_000)
_AREA_FILES: Final = 10_000
_FOLDER_FILES: Final = 100
_BYTES: Final = 200
_LIST_BATCH: Final = 1_000
_UNUSED: Final = 10_000
#: All contents are new, and are to count as old.
_NO_GRACE: Final = timedelta(seconds=-1)
_MEBIBYTE: Final = 1 << 20


def _data(number: int) -> bytes:
    return f"{number}\n".encode().ljust(_BYTES, b".")


def _sha256(number: int) -> str:
    return hashlib.sha256(_data(number)).hexdigest()


class MadeUpStore:
    """Implements ``storage.files.stores.store.ObjectStore`` for contents by number."""

    def __init__(self, keys: Path) -> None:
        self._keys = keys
        self._put: dict[str, bytes] = {}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {_sha256(number): number for number in range(sum(_CHATS))}

    async def put(self, key: str, data: bytes) -> None:
        """Keep an object in memory."""
        self._put[key] = data

    async def get(self, key: str) -> bytes | None:
        """Return one that was kept, or a file of the three chats."""
        return self._put[key] if key in self._put else _data(self._numbers[key.partition(".")[0]])

    async def size(self, key: str) -> int | None:
        """Return a size."""
        return _BYTES

    async def delete(self, keys: Collection[str]) -> None:
        """Take any time but that of a request."""

    async def list(self) -> AsyncIterator[list[StoredObject]]:
        """Yield all keys."""
        at = datetime.now(UTC) - timedelta(days=30)
        with self._keys.open() as lines:
            while batch := [line.rstrip() for line in itertools.islice(lines, _LIST_BATCH)]:
                yield [StoredObject(key=key, size_bytes=_BYTES, modified_at=at) for key in batch]


class Place:
    """A database and what belongs to it."""

    def __init__(self, settings: DatabaseSettings, root: Path) -> None:
        self.settings = settings
        self.root = root
        self.keys = root / "keys"

    @contextlib.asynccontextmanager
    async def host(self, name: str) -> AsyncIterator[tuple[HostFiles, Path]]:
        """A host with a directory of its own."""
        root = self.root / name
        async with self.database() as database:
            yield (
                HostFiles(database, MadeUpStore(self.keys), root=root / "files", cache_bytes=1 << 30),
                root / "areas",
            )

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        """The database, as a process uses it."""
        database = Database(self.settings, self.root)
        try:
            yield database
        finally:
            await database.dispose()


async def _fill(place: Place, count: int) -> None:
    """Make the rows, in the order in which hosts make them."""
    await upgrade(place.settings, place.root)
    start = 0
    sizes = [*_CHATS]
    while sum(sizes) < count:
        sizes.append(min(_AREA_FILES, count - sum(sizes)))
    async with place.database() as database:
        with place.keys.open("w") as keys:
            for number, size in enumerate(sizes):
                numbers = range(start, start + size)
                start += size
                by_hash = {_sha256(one): one for one in numbers}
                async with database.begin() as tx:
                    rows = await tx.contents.announce(dict.fromkeys(by_hash, _BYTES))
                    await tx.contents.mark_stored(dict.fromkeys(row.id for row in rows.values()))
                keys.writelines(f"{row.key}\n" for row in rows.values())
                entries = [
                    Entry(
                        path=f"d{(one - numbers[0]) // _FOLDER_FILES}/{one}.txt",
                        content_id=rows[sha256].id,
                        bytes=_BYTES,
                        modified_ns=1,
                    )
                    for sha256, one in by_hash.items()
                ]
                async with database.begin() as tx:
                    await tx.files.commit(_name(number), put=entries)
        async with database.autocommit() as tx:
            await tx.connection.exec_driver_sql("ANALYZE")


def _name(number: int) -> str:
    return f"shared/chat-{number}"


async def _use(place: Place, number: int, host: str, *, changes: bool = False) -> None:
    """Bring the files of a chat, as a run does; perhaps change one and commit it."""
    async with place.host(host) as (files, areas):
        area = AreaPlace(name=_name(number), directory=areas / str(number))
        async with files.use(area) as use:
            if changes:
                (area.directory / "changed.txt").write_text(f"{time.time_ns()}")
                await use.push()


async def _collect(place: Place) -> None:
    async with place.host("collector") as (files, _):
        await collect(files.contents._database, files.store, grace=_NO_GRACE)


async def _add_unused(place: Place) -> None:
    async with place.database() as database, database.begin() as tx:
        new = {hashlib.sha256(os.urandom(16)).hexdigest(): _BYTES for _ in range(_UNUSED)}
        rows = await tx.contents.announce(new)
        await tx.contents.mark_stored(dict.fromkeys(row.id for row in rows.values()))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a step took."""

    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    most_bytes: int


def _in_child(work: Coroutine[Any, Any, None], server_pid: int | None) -> Usage:
    """Run work in a child process; raises ``RuntimeError`` if it fails."""
    servers = [] if server_pid is None else [server_pid]
    before, started = tree_cpu_seconds(servers), time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(work)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    work.close()
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"a step ended with {os.waitstatus_to_exitcode(status)}")
    return Usage(
        seconds=time.monotonic() - started,
        cpu_seconds=used.ru_utime + used.ru_stime,
        server_cpu_seconds=tree_cpu_seconds(servers) - before,
        most_bytes=used.ru_maxrss << 10,
    )


def _show(name: str, usages: Sequence[Usage]) -> None:
    cpu, server, seconds = (
        statistics.median(getattr(one, field) for one in usages)
        for field in ("cpu_seconds", "server_cpu_seconds", "seconds")
    )
    most = max(one.most_bytes for one in usages) / _MEBIBYTE
    print(f"{name:44} {cpu:8.2f} {server:8.2f} {seconds:8.2f} {most:8.0f}", flush=True)


async def _nothing() -> None:
    """Show what a process takes that does nothing."""


def _measure(name: str, settings: DatabaseSettings, options: argparse.Namespace, server: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Place(settings, Path(directory))
        print(f"{name:44} {'CPU s':>8} {'server s':>8} {'s':>8} {'MiB':>8}")
        _show("a process that does nothing", [_in_child(_nothing(), server)])
        _show("rows made", [_in_child(_fill(place, options.count), server)])
        for number, size in enumerate(_CHATS):
            hosts = [f"host-{number}-{repetition}" for repetition in range(options.repetitions)]
            _show(
                f"{size} files brought to a new host",
                [_in_child(_use(place, number, host), server) for host in hosts],
            )
            _show(
                f"{size} files, nothing changed",
                [_in_child(_use(place, number, host), server) for host in hosts],
            )
            _show(
                f"{size} files, one added and committed",
                [_in_child(_use(place, number, hosts[0], changes=True), server) for _ in hosts],
            )
        _show(
            "a collection that finds nothing",
            [_in_child(_collect(place), server) for _ in range(options.repetitions)],
        )
        _in_child(_add_unused(place), server)
        _show(f"a collection that deletes {_UNUSED}", [_in_child(_collect(place), server)])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_files", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="files (default: 1000000)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each step (default: 3)")
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table per database."""
    interrupted_by_sigterm()
    options = parse(argv)
    if options.database != "postgres":
        _measure("SQLite", DatabaseSettings(), options, None)
    if options.database != "sqlite":
        with postgres_server() as server:
            url: Any = server.url
            _measure("PostgreSQL", DatabaseSettings(url=url), options, server.pid)
    return 0


if __name__ == "__main__":
    sys.exit(main())
