"""Plugin code reads and writes ordinary paths while the files of chats are in a store."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.areas.synced import SyncedAreas
from nekro.app.background import BackgroundLoop
from nekro_agent import runtime
from nekro_agent.errors import FilesQuotaError
from nekro_agent.files import staging
from nekro_agent.files.file_system import FileSystem
from nekro_agent.testing import InMemoryRuntime
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.files.host_files import HostFiles
from storage.files.stores.store import ObjectStore

CHAT, BOX = "onebot_v11-private_1", "box"


class Worker:
    """A worker process on a host with a disk of its own."""

    def __init__(
        self,
        root: Path,
        world: InMemoryRuntime,
        where: DatabaseSettings,
        store: ObjectStore,
        settings: Settings,
    ) -> None:
        self.database = Database(where, root)
        self.background = BackgroundLoop(self.database)
        self.files = HostFiles(self.database, store, root=root / "files", cache_bytes=1 << 30)
        self.areas = SyncedAreas(DataAreas(root), self.files, self.background, settings)
        self.fs = FileSystem(CHAT, BOX)
        self._runtime = replace(world.runtime, areas=self.areas, data_dir=root)

    @contextlib.asynccontextmanager
    async def call(self, label: str = "method") -> AsyncIterator[FileSystem]:
        """The block is the code of a method."""
        with runtime.bound(self._runtime):
            async with staging.call_scope(label, self.fs):
                yield self.fs

    @contextlib.contextmanager
    def outside(self) -> Any:
        """The block belongs to no call."""
        with runtime.bound(self._runtime):
            yield

    async def read(self, name: str) -> str | None:
        """What a method reads from the shared files."""
        async with self.call("reader") as fs:
            path = fs.shared_path / name
            return path.read_text() if path.is_file() else None

    def uses(self) -> int:
        """Locks of areas that this process holds."""
        held = (Path("/proc/self/fd") / name for name in map(str, range(1024)))
        return sum(1 for fd in held if fd.is_symlink() and str(self.files._root) in str(fd.readlink()))

    async def close(self) -> None:
        await self.areas.close()
        await asyncio.to_thread(self.background.close)
        await self.database.dispose()


@pytest.fixture
async def make_worker(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path, store: ObjectStore, settings: Settings
) -> AsyncIterator[Callable[..., Worker]]:
    made: list[Worker] = []
    where = migrated_copy("sqlite")
    async with InMemoryRuntime() as world:

        def make(name: str, *, shared_bytes: int = 1 << 30) -> Worker:
            sandbox = settings.sandbox.model_copy(update={"shared_bytes": shared_bytes})
            given = settings.model_copy(update={"sandbox": sandbox})
            (tmp_path / name).mkdir()
            made.append(Worker(tmp_path / name, world, where, store, given))
            return made[-1]

        yield make
        for worker in made:
            await worker.close()
            assert worker.uses() == 0


@pytest.fixture
def one(make_worker: Callable[..., Worker]) -> Worker:
    return make_worker("one")


@pytest.fixture
def two(make_worker: Callable[..., Worker]) -> Worker:
    return make_worker("two")


async def test_what_a_method_wrote_is_there_for_the_next_line_elsewhere(one: Worker, two: Worker) -> None:
    async with one.call() as fs:
        fs.get_file("/app/shared/new.txt").write_text("private copy")
        (fs.shared_path / "old.txt").write_text("in place")
        sent = await fs.mixed_forward_file(b"picture", "a.png")
    assert (await two.read("new.txt"), await two.read("old.txt")) == ("private copy", "in place")
    async with two.call() as fs:
        assert fs.get_file(sent).read_bytes() == b"picture"


async def test_a_synchronous_method_and_its_threads_bring_an_area_once(one: Worker, two: Worker) -> None:
    async with one.call() as fs:
        (fs.shared_path / "a.txt").write_text("a")

    def method(fs: FileSystem) -> str:
        found: list[str] = []

        def read() -> None:
            found.append((fs.shared_path / "a.txt").read_text())

        contexts = [contextvars.copy_context(), contextvars.copy_context()]
        threads = [threading.Thread(target=context.run, args=(read,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (fs.shared_path / "b.txt").write_text("".join(found))
        return "".join(found)

    async with two.call() as fs:
        answers = await asyncio.gather(*(asyncio.to_thread(method, fs) for _ in range(3)))
    assert answers == ["aa"] * 3 and await one.read("b.txt") == "aa"


async def test_what_a_label_has_used_is_brought_before_its_code_runs(one: Worker, two: Worker) -> None:
    async with one.call() as fs:
        (fs.shared_path / "a.txt").write_text("a")
    await two.read("a.txt")
    async with one.call() as fs:
        (fs.shared_path / "a.txt").write_text("b")
    async with two.call("reader"):
        assert (two.areas.shared(BOX).directory / "a.txt").read_text() == "b"


async def test_a_cancelled_call_commits_nothing(one: Worker, two: Worker) -> None:
    async def method() -> None:
        async with one.call() as fs:
            (fs.shared_path / "half.txt").write_text("half")
            begun.set()
            await asyncio.Event().wait()

    begun = asyncio.Event()
    task = asyncio.create_task(method())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.uses() == 0
    assert await two.read("half.txt") is None and await one.read("half.txt") is None


async def test_what_a_call_that_fails_has_written_is_kept(one: Worker, two: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        async with one.call() as fs:
            (fs.shared_path / "log.txt").write_text("before")
            raise ZeroDivisionError
    assert await two.read("log.txt") == "before"


async def test_a_call_fails_if_its_files_exceed_the_area(
    make_worker: Callable[..., Worker], two: Worker
) -> None:
    small = make_worker("small", shared_bytes=10)
    with pytest.raises(FilesQuotaError, match="shared/box"):
        async with small.call() as fs:
            (fs.shared_path / "large.txt").write_text("x" * 11)
    assert await two.read("large.txt") is None and await small.read("large.txt") is None


async def test_the_error_of_a_call_is_not_replaced_by_that_of_its_commit(
    make_worker: Callable[..., Worker],
) -> None:
    small = make_worker("small", shared_bytes=10)
    with pytest.raises(ZeroDivisionError):
        async with small.call() as fs:
            (fs.shared_path / "large.txt").write_text("x" * 11)
            raise ZeroDivisionError


async def test_files_are_there_before_something_names_them(one: Worker, two: Worker) -> None:
    async with one.call() as fs:
        sent = await fs.mixed_forward_file(b"picture", "a.png")
        await staging.commit()
        async with two.call() as other:
            assert other.get_file(sent).read_bytes() == b"picture"
            (other.upload_path / "b.txt").write_text("b")
    async with one.call() as fs:
        assert (fs.upload_path / "b.txt").read_text() == "b"


async def test_calls_of_a_chat_share_the_files_of_a_host(one: Worker, two: Worker) -> None:
    async def method(number: int) -> None:
        async with one.call() as fs:
            (fs.shared_path / f"{number}.txt").write_text(str(number))
            await asyncio.sleep(0)

    await asyncio.gather(*(method(number) for number in range(4)))
    assert [await two.read(f"{number}.txt") for number in range(4)] == ["0", "1", "2", "3"]


async def test_code_outside_of_calls_sees_the_newest_files_and_its_own_are_committed(
    one: Worker, two: Worker
) -> None:
    async with two.call() as fs:
        (fs.shared_path / "a.txt").write_text("a")
    with one.outside():
        shared = await asyncio.to_thread(lambda: one.fs.shared_path)
        assert (shared / "a.txt").read_text() == "a"
    (shared / "later.txt").write_text("later")

    async def is_there() -> bool:
        return await two.read("later.txt") == "later"

    await eventually(is_there)


async def test_a_task_that_a_call_left_running_belongs_to_no_call(one: Worker, two: Worker) -> None:
    ended = asyncio.Event()

    async def left() -> None:
        await ended.wait()
        with one.outside():
            (one.fs.shared_path / "left.txt").write_text("left")

    async with one.call():
        task = asyncio.create_task(left())
    ended.set()
    await task
    await one.areas.close()
    assert await two.read("left.txt") == "left"


async def test_files_are_forwarded_without_blocking_the_loop(
    one: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BackgroundLoop, "answer", None)
    async with one.call() as fs:
        sent = await fs.mixed_forward_file(b"a", "a.txt")
        assert await fs.bring_to_uploads(sent) == sent


async def test_a_blocking_request_on_the_background_loop_is_an_error(one: Worker) -> None:
    async def code() -> None:
        one.areas.shared_dir(BOX)

    with pytest.raises(RuntimeError, match="awaits its work"):
        await one.background.wait(code())
