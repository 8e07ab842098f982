"""Kills hosts at each step of what they do with files, and looks at what other hosts have then.

Started by ``test_kills.py``: ``killed_walk.py SCENARIO DATABASE_URL STORE_URL ROOT FIRST EVERY`` prints how
many steps there are, and ends with 1 and a traceback if one of them breaks a promise. Each step runs in a
child that is forked from this process, which has no threads. A step is a request to the store, a statement, a
commit, or a change of the file system; the child is killed before or after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import Any

from storage.files.stores import store as objects

objects.PART_BYTES = 1024  # type: ignore[misc] # before others import it: so large contents are cheap

from broker_config.settings import DatabaseSettings, Settings  # noqa: E402
from nekro.app.areas.synced import SyncedAreas  # noqa: E402
from nekro.app.background import BackgroundLoop  # noqa: E402
from nekro.app.chats.stored_files import StoredFiles  # noqa: E402
from nekro_agent.ports import ChatInfo, PartialContent  # noqa: E402
from storage.driver.postgresql import PostgresConnection  # noqa: E402
from storage.driver.sqlite import SqliteConnection  # noqa: E402
from storage.engine import Database  # noqa: E402
from storage.files.areas import DataAreas  # noqa: E402
from storage.files.collection import check, collect  # noqa: E402
from storage.files.host_files import AreaPlace, HostFiles  # noqa: E402
from storage.files.stores.opening import open_store  # noqa: E402
from workers.jobs.stored_parts import StoredParts  # noqa: E402

NOW = timedelta(seconds=-1)
OLD = {"a": "old", "b": "old, too", "d/c": "kept"}
NEW = {"a": "new", "d/c": "kept", "e/large": "x" * 2500, "e/f": "added"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.truncate")


class Steps:
    """Counts the steps of this process, and kills it at one of them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_counting = False
        self.last = 0
        self.count = 0

    def begin(self, last: int) -> None:
        """Count from here on; 0: kill at none."""
        self.count, self.last, self._is_counting = 0, last, True

    def end(self) -> None:
        self._is_counting = False

    def step(self) -> None:
        if not self._is_counting:
            return
        with self._lock:
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    def observe(self, owner: Any, *names: str) -> None:
        """Make a step before and after each call of methods."""
        for name in names:
            setattr(owner, name, self._stepping(getattr(owner, name)))

    def _stepping(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*args: Any, **options: Any) -> Any:
            self.step()
            result = await method(*args, **options)
            self.step()
            return result

        return run

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
            self.step()


steps = Steps()


class Host:
    """A host with a disk of its own; ``number`` tells the walk's steps apart, which share the database."""

    def __init__(self, root: Path, database_url: str, store_url: str, number: int) -> None:
        self.root, self.number = root, number
        self.chat, self.box = f"chat-{number}", f"box-{number}"
        settings = DatabaseSettings(url=database_url, pool_timeout_seconds=30)
        self.database = Database(settings, root)
        self.store = open_store(store_url)
        self.background = BackgroundLoop(self.database)
        self.files = HostFiles(self.database, self.store, root=root / "files", cache_bytes=1 << 30)
        self.data = DataAreas(root)
        self.areas = SyncedAreas(
            self.data, self.files, self.background, Settings(data_dir=root), policy_of=lambda _: "synced"
        )

    def here(self) -> dict[str, str]:
        """The shared files on this host."""
        return texts(self.data.shared_dir(self.box))

    async def brought(self) -> dict[str, str]:
        """The shared files as a run of this host finds them."""
        async with self.areas.for_run(self.chat, self.box, fence=None):
            return self.here()

    @property
    def place(self) -> AreaPlace:
        return self.areas.plugin(f"tests.plugin{self.number}")

    async def require_sound(self) -> None:
        """Nothing that a file needs is missing, a collection leaves exactly that, and sums are right."""
        assert (await check(self.database, self.store, reads=True)).damages == []
        await collect(self.database, self.store, grace=NOW)
        assert (await check(self.database, self.store, reads=True)).damages == []
        sql = """
SELECT a.name, a.names, a.bytes, count(e.folded), coalesce(sum(c.bytes), 0) FROM file_areas a
LEFT JOIN file_entries e ON e.area_id = a.id AND e.until IS NULL
LEFT JOIN file_contents c ON c.id = e.content_id GROUP BY a.name, a.names, a.bytes
"""
        async with self.database.read() as tx:
            wanted = {
                one.key for one in await tx.contents.needed(after=0, limit=1 << 20) if one.bytes <= 1024
            }
            sums = [tuple(row) for row in (await tx.connection.exec_driver_sql(sql)).all()]
        found = {found.key async for batch in self.store.list() for found in batch}
        assert {key for key in found if not key.startswith("installation.")} == wanted
        assert [row for row in sums if row[1:3] != row[3:]] == []

    async def close(self) -> None:
        await self.areas.close()
        await asyncio.to_thread(self.background.close)
        await self.database.dispose()


def texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def write(root: Path, files: dict[str, str]) -> None:
    """Make a directory have files, in place where it has others."""
    for path in root.rglob("*"):
        if path.is_file() and str(path.relative_to(root)) not in files:
            path.unlink()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)


class Scenario:
    """What a host does that is killed, and what others must find then: the old files or the new ones."""

    #: Contents differ between steps, so that none finds those of another in the store.
    def __init__(self, number: int) -> None:
        self.old = {path: f"{number} {text}" for path, text in OLD.items()}
        self.new = {path: f"{number} {text}" for path, text in NEW.items()}
        self.new["d/c"] = self.old["d/c"]

    async def prepare(self, host: Host, killed: Host) -> None:
        """Make the old version, before the other host is killed."""
        await self.make(self.old, host)

    async def make(self, files: dict[str, str], host: Host) -> None:
        """Make a version, as a run does."""
        async with host.areas.for_run(host.chat, host.box, fence=None) as use:
            write(host.data.shared_dir(host.box), files)
            await use.push()

    async def run(self, host: Host) -> None:
        """Do what is killed."""
        raise NotImplementedError

    async def verify(self, killed: Host, other: Host) -> None:
        """Restart; on the host that was killed, and on another one."""
        found = await other.brought()
        assert found in (self.old, self.new), found
        assert await killed.brought() == found, killed.here()
        await self.run(killed)
        assert await other.brought() == self.new, other.here()


class Run(Scenario):
    """A run of code: brings files, changes them, commits them."""

    async def run(self, host: Host) -> None:
        await self.make(self.new, host)


class Call(Scenario):
    """A call of a method, which requests paths in a scope; both areas."""

    async def run(self, host: Host) -> None:
        async with host.areas.scope("call"):
            write(await asyncio.to_thread(host.areas.shared_dir, host.box), self.new)
            write(await asyncio.to_thread(host.areas.uploads_dir, host.chat), {"u": self.new["a"]})

    async def verify(self, killed: Host, other: Host) -> None:
        async with other.areas.scope("call"):
            uploads = texts(await asyncio.to_thread(other.areas.uploads_dir, other.chat))
        assert uploads in ({}, {"u": self.new["a"]})
        await super().verify(killed, other)


class Upload(Scenario):
    """Files that the gateway stores, without a directory of the area."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.old = {"a": self.old["a"]}
        self.new = {"a": self.new["e/large"]}

    async def run(self, host: Host) -> None:
        chat = ChatInfo(chat_key=host.chat, container_key=host.box)
        files = StoredFiles(host.areas, host.database, chat)
        sent = host.root / "sent"
        sent.write_text(self.new["a"])
        with sent.open("rb") as file:
            await asyncio.to_thread(files.put, "a", file, "/app/shared/a")


class Bring(Scenario):
    """A host that has the old version brings the new one."""

    async def prepare(self, host: Host, killed: Host) -> None:
        await super().prepare(host, killed)
        assert await killed.brought() == self.old
        await self.make(self.new, host)

    async def run(self, host: Host) -> None:
        assert await host.brought() == self.new


class Plugin(Scenario):
    """A call of a plugin whose directory is synced: changes of two hosts are a conflict, others are none."""

    async def prepare(self, host: Host, killed: Host) -> None:
        await self.change(self.old, host)

    async def run(self, host: Host) -> None:
        await self.change(self.new, host)

    async def change(self, files: dict[str, str], host: Host) -> None:
        async with host.areas.using(host.place) as use:
            write(host.place.directory, files)
            await use.push()

    async def verify(self, killed: Host, other: Host) -> None:
        async with other.areas.using(other.place):
            found = texts(other.place.directory)
        assert found in (self.old, self.new), found
        later = {**self.new, "a": f"{self.new['a']} and later"}
        await self.change(later, killed)
        async with other.areas.using(other.place):
            assert texts(other.place.directory) == later


class Collection(Scenario):
    """A collection; what no file needs is of each size."""

    async def prepare(self, host: Host, killed: Host) -> None:
        await super().prepare(host, killed)
        await self.make(self.new, host)
        added = [
            host.files.contents.cache.add(io.BytesIO(f"{host.number} {size}".encode() * size))
            for size in (1, 10, 1000)
        ]
        await host.background.wait(host.files.contents.put(added))

    async def run(self, host: Host) -> None:
        await host.background.wait(collect(host.database, host.store, grace=NOW))

    async def verify(self, killed: Host, other: Host) -> None:
        await self.run(other)
        assert await other.brought() == self.new
        assert await killed.brought() == self.new


class Download(Scenario):
    """A download that stores parts, and the whole at its end."""

    async def prepare(self, host: Host, killed: Host) -> None:
        """Begin without anything."""

    async def run(self, host: Host) -> None:
        data = (self.new["e/large"] + "y" * 2500).encode()
        digest = hashlib.sha256(data).hexdigest()
        target = f"models/{host.number}"
        fence = await self._claimed(host, target)
        parts = StoredParts(host.database, host.files, host.background, target=target, fence=fence)
        size = parts.part_bytes(len(data))
        found = await parts.find(digest, is_public=True)
        stored = {} if found is None else found.parts
        for offset in stored:
            assert await parts.read(offset) == data[offset : offset + size]
        of = PartialContent(url="http://host/model", sha256=digest, validator='"1"', whole_bytes=len(data))
        for offset in range(0, len(data), size):
            if offset not in stored:
                await parts.put(of, offset, data[offset : offset + size])
        await parts.finish(
            digest, len(data), read=lambda start, size: data[start : start + size], is_public=True
        )
        async with host.database.begin() as tx:
            await tx.downloads.end(target, fence=fence, report={})
            await parts.record(tx)

    async def verify(self, killed: Host, other: Host) -> None:
        await self.run(other)
        await self.run(killed)

    async def _claimed(self, host: Host, target: str) -> int:
        while True:
            async with host.database.begin() as tx:
                claimed = await tx.downloads.claim(target, request="", owner="", lease_seconds=0.05)
            if claimed is not None:
                return claimed[0]
            await asyncio.sleep(0.02)


SCENARIOS = {kind.__name__.lower(): kind for kind in (Run, Call, Upload, Bring, Plugin, Collection, Download)}


class Walk:
    """One scenario, killed at one step after another; each step has files, hosts and a chat of its own."""

    def __init__(self, scenario: str, database_url: str, store_url: str, root: Path) -> None:
        self._scenario = SCENARIOS[scenario]
        self._addresses = database_url, store_url
        self._root = root

    def count(self) -> int:
        """Return the number of steps."""
        reading, writing = os.pipe()

        async def run() -> None:
            await self._run(0, last=0)
            os.write(writing, str(steps.count).encode())

        assert forked(run) == 0
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return int(pipe.read())

    def kill(self, number: int) -> None:
        """Kill a host at a step, and look at what others have."""
        code = forked(lambda: self._run(number, last=number))
        assert code in (0, -signal.SIGKILL), f"step {number}: ended with {code}"
        assert forked(lambda: self._verify(number)) == 0, f"step {number}: see above"

    @asynccontextmanager
    async def _hosts(self, number: int, *names: str) -> AsyncIterator[list[Host]]:
        hosts = [Host(self._root / f"{number}-{name}", *self._addresses, number) for name in names]
        for host in hosts:
            host.root.mkdir(exist_ok=True)
        try:
            yield hosts
        finally:
            for host in hosts:
                await host.close()

    async def _run(self, number: int, *, last: int) -> None:
        async with self._hosts(number, "other", "killed") as (other, killed):
            steps.observe(type(other.store), "put", "get", "size", "delete")
            for driver in SqliteConnection, PostgresConnection:
                steps.observe(driver, "execute", "commit")
            sys.addaudithook(steps.audit)
            scenario = self._scenario(number)
            await scenario.prepare(other, killed)
        async with self._hosts(number, "killed") as (again,):
            steps.begin(last)
            await scenario.run(again)
            steps.end()

    async def _verify(self, number: int) -> None:
        async with self._hosts(number, "fresh", "killed") as (fresh, killed):
            await self._scenario(number).verify(killed, fresh)
            await fresh.require_sound()


def forked(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run work in a child; returns its exit code, negative for a signal."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(asyncio.wait_for(work(), 60))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(scenario: str, database_url: str, store_url: str, root: Path, first: int, every: int) -> None:
    """Walk from a step to the last one."""
    os.fsync = lambda fd: None  # a kill loses nothing of what the kernel has
    walk = Walk(scenario, database_url, store_url, root)
    count = walk.count()
    print(count)
    for number in range(first, count + 1, every):
        walk.kill(number)


if __name__ == "__main__":
    name, database, objects_at, place, start, stride = sys.argv[1:]
    main(name, database, objects_at, Path(place), int(start), int(stride))
