"""Runs of code on two hosts that share no disk: their sandbox managers have one database and one store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hosts import opened
from waiting import eventually

from broker_config.settings import DatabaseSettings, FileSettings, SandboxSettings, Settings
from nekro.app.areas.synced import SyncedAreas
from nekro.app.background import BackgroundLoop
from nekro.sandbox.drivers.selection import build_driver
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import (
    Limit,
    Raised,
    Returned,
    RunRequest,
    RunResult,
    Stopped,
    StopType,
    StubCall,
    StubMethod,
    StubResult,
)
from nekro.wire.values import encode_value
from nekro_agent.errors import SettingsError
from nekro_agent.methods import SandboxMethodType
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.files.cache import CachedContent
from storage.files.host_files import HostFiles
from storage.files.manifest import Area
from storage.files.stores.directory import DirectoryStore

CHAT = "chat"
BOX = "box"


class Machine:
    """A host: its directories, and its sandboxes."""

    def __init__(self, root: Path, database: Database, objects: Path, **sandbox: Any) -> None:
        self.database = database
        self.settings = SandboxSettings(**sandbox)
        self.background = BackgroundLoop(database)
        self.files = HostFiles(database, DirectoryStore(objects), root=root / "files", cache_bytes=1 << 30)
        self.directories = DataAreas(root)
        settings = Settings(data_dir=root, sandbox=self.settings)
        self.areas = SyncedAreas(self.directories, self.files, self.background, settings)
        self.manager = SandboxManager(self.settings, self.areas, driver=build_driver(self.settings))

    @property
    def shared(self) -> Path:
        return self.directories.shared_dir(BOX)

    async def run(
        self,
        code: str,
        *methods: StubMethod,
        dispatch: Callable[[StubCall], Any] | None = None,
        fence: int | None = None,
        program_id: str | None = None,
    ) -> RunResult:
        asked = request(code, *methods, dispatch=dispatch, fence=fence)
        return await self.manager.run(replace(asked, program_id=program_id))

    async def write(self, path: str, text: str, *, area: str = "shared") -> None:
        """Change a file as a method on this host does."""
        place = self.areas.shared(BOX) if area == "shared" else self.areas.uploads(CHAT)
        scope = self.areas.scope("method")
        async with scope as used:
            await used.bring(place)
            (place.directory / path).parent.mkdir(parents=True, exist_ok=True)
            (place.directory / path).write_text(text)

    async def area(self) -> Area | None:
        async with self.database.read() as tx:
            return await tx.files.find(f"shared/{BOX}")


def request(
    code: str,
    *methods: StubMethod,
    dispatch: Callable[[StubCall], Any] | None = None,
    fence: int | None = None,
) -> RunRequest:
    async def refuse(call: StubCall) -> StubResult:
        raise AssertionError(call)

    return RunRequest(
        run_id=uuid4().hex,
        chat_key=CHAT,
        container_key=BOX,
        code=code,
        methods=methods,
        dispatch=dispatch or refuse,
        fence=fence,
    )


def method(token: str, kind: SandboxMethodType = SandboxMethodType.TOOL) -> StubMethod:
    return StubMethod(
        token=token,
        name=token,
        path=f"alice.tools.{token}",
        signature="(*args)",
        doc=None,
        type=kind,
        timeout_seconds=30,
    )


def nothing() -> Returned:
    return Returned(value=encode_value(None, max_bytes=100))


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@contextlib.asynccontextmanager
async def started(root: Path, database: Database, objects: Path, **sandbox: Any) -> AsyncIterator[Machine]:
    machine = Machine(root, database, objects, **sandbox)
    await machine.manager.start()
    try:
        yield machine
    finally:
        await machine.manager.close()
        await asyncio.to_thread(machine.background.close)


@pytest.fixture
async def machines(database: Database, tmp_path: Path) -> AsyncIterator[tuple[Machine, Machine]]:
    async with (
        started(tmp_path / "one", database, tmp_path / "objects") as one,
        started(tmp_path / "two", database, tmp_path / "objects") as two,
    ):
        yield one, two


async def test_a_run_reads_what_a_run_on_another_host_wrote(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    await one.run("import os; os.makedirs('/app/shared/a'); open('/app/shared/a/b.txt', 'w').write('one')")
    await two.run("name = '/app/shared/a/b.txt'; text = open(name).read(); open(name, 'w').write(text * 2)")
    result = await one.run("print(open('/app/shared/a/b.txt').read())")
    assert (result.output, result.error) == ("oneone\n", None)


async def test_a_method_on_another_host_and_the_lines_around_its_call_see_each_others_files(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines

    async def draw(call: StubCall) -> StubResult:
        async with two.areas.scope("draw") as scope:
            place = (await scope.bring(two.areas.shared(BOX))).place
            data = (place.directory / "data.csv").read_text()
            (place.directory / "data.csv").write_text(f"{data},changed")
            (place.directory / "picture.png").write_text(f"picture of {data}")
        await two.write("upload.txt", "an upload", area="uploads")
        return nothing()

    code = """
open('/app/shared/data.csv', 'w').write('1,2')
draw()
print(open('/app/shared/data.csv').read(), open('/app/shared/picture.png').read())
print(open('/app/uploads/upload.txt').read())
open('/app/shared/picture.png', 'a').write(', edited')
import os
os.remove('/app/shared/data.csv')
"""
    result = await one.run(code, method("draw"), dispatch=draw)
    assert (result.output, result.error) == ("1,2,changed picture of 1,2\nan upload\n", None)
    result = await two.run(
        "import os; print(sorted(os.listdir('/app/shared')), open('shared/picture.png').read())"
    )
    assert result.output == "['picture.png'] picture of 1,2, edited\n"


async def test_another_host_undoes_what_a_lost_attempt_has_changed(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    await one.run(
        "for name in ('log', 'gone', 'old'):\n    with open(name, 'w') as f: f.write(name * 20_000)\n"
    )
    code = """
import os
with open('log', 'a') as file:
    file.write('once')
os.remove('gone')
os.rename('old', 'new')
step()
os.mkdir('made')
open('made/x', 'w').close()
step()
print(sorted(os.listdir()), os.path.getsize('log'), open('log').read()[-4:], os.path.getsize('new'))
"""
    answered = 0

    async def step(call: StubCall) -> StubResult:
        nonlocal answered
        answered += 1
        if answered == 2:
            one.manager.stop(run_id)
        return nothing()

    asked = request(code, method("step"), dispatch=step)
    run_id = asked.run_id
    result = await one.manager.run(replace(asked, program_id="program"))
    assert result.stop_type is StopType.MANUAL
    result = await two.run(code, method("step"), dispatch=step, program_id="program")
    assert result.output == "['log', 'made', 'new'] 60004 once 60000\n"
    await two.manager.forget("program", chat_key=CHAT, container_key=BOX)
    await two.run("open('after', 'w').close()")
    area = await two.area()
    assert area is not None
    async with two.database.read() as tx:
        paths = {entry.path for entry in await tx.files.entries(area)}
    assert paths == {"after", "log", "made", "made/x", "new"}


async def test_calls_at_the_same_time_exchange_files(machines: tuple[Machine, Machine]) -> None:
    one, two = machines

    async def add(call: StubCall) -> StubResult:
        await two.write(call.call_id, "x")
        return nothing()

    code = """
import threading, os
def work(number):
    open(f'/app/shared/own-{number}', 'w').write('y')
    add()
threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(os.listdir('/app/shared')))
"""
    result = await one.run(code, method("add"), dispatch=add)
    assert (result.output, result.error) == ("12\n", None)
    assert len([*two.shared.iterdir()]) >= 6
    area = await two.area()
    assert area is not None
    assert area.names == 12


async def test_a_run_without_changes_makes_no_version_and_reads_no_file_again(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    await one.run("open('/app/shared/a', 'w').write('text')")
    for host in machines:  # the first run on a host gives the directory to the user of its sandboxes
        await host.run("print(open('/app/shared/a').read())")
    before = await one.area()

    def refuse(*args: object, **kwargs: object) -> CachedContent:
        raise AssertionError(args)

    for host in machines:
        monkeypatch.setattr(host.files.contents, "put", refuse)
        monkeypatch.setattr(host.files.contents, "fetch", refuse)
        monkeypatch.setattr(host.files.contents.cache, "add", refuse)
        result = await host.run("print(open('/app/shared/a').read(), open('shared/a').read())")
        assert (result.output, result.error) == ("text text\n", None)
    assert await two.area() == before


async def test_files_that_a_call_brings_belong_to_the_program(machines: tuple[Machine, Machine]) -> None:
    one, two = machines

    async def give(call: StubCall) -> StubResult:
        async with two.areas.scope("give") as scope:
            place = (await scope.bring(two.areas.shared(BOX))).place
            (place.directory / "folder").mkdir()
            (place.directory / "folder" / "file").write_text("old")
        return nothing()

    code = """
give()
import os
open('/app/shared/folder/file', 'a').write('+new')
os.rename('/app/shared/folder/file', '/app/shared/folder/other')
os.chmod('/app/shared/folder/other', 0o600)
"""
    result = await one.run(code, method("give"), dispatch=give)
    assert result.error is None
    result = await two.run("print(open('/app/shared/folder/other').read())")
    assert result.output == "old+new\n"


async def test_what_a_run_left_that_was_cancelled_is_undone(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines
    await one.run("open('/app/shared/a', 'w').write('old')")
    called = asyncio.Event()

    async def wait(call: StubCall) -> StubResult:
        called.set()
        await asyncio.Event().wait()
        return nothing()

    code = """
import threading
threading.Thread(target=wait, daemon=True).start()
import time
time.sleep(0.5)
open('/app/shared/a', 'w').write('half')
print('written')
time.sleep(60)
"""
    printed = asyncio.Event()
    run = request(code, method("wait"), dispatch=wait)
    run = RunRequest(**{**vars(run), "on_output": lambda text: printed.set()})
    task = asyncio.create_task(one.manager.run(run))
    await printed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result = await one.run("print(open('/app/shared/a').read())")
    assert result.output == "old\n"


async def test_a_run_that_a_result_ends_has_committed_its_files_when_it_returns(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines

    async def stop(call: StubCall) -> StubResult:
        return Stopped(stop=StopType.AGENT)

    code = """
open('/app/shared/a', 'w').write('kept')
try:
    stop()
finally:
    open('shared/b', 'w').write('x')
"""
    result = await one.run(code, method("stop", SandboxMethodType.AGENT), dispatch=stop)
    assert (result.stop_type, result.error) == (StopType.AGENT, None)
    assert not one.manager._ending
    result = await two.run("import os; print(sorted(os.listdir('/app/shared')))")
    assert result.output == "['a', 'b']\n"


async def test_a_lost_lease_and_a_quota_are_errors_of_the_run(database: Database, tmp_path: Path) -> None:
    async with started(tmp_path / "one", database, tmp_path / "objects", shared_files=3) as one:
        async with database.begin() as tx:
            await tx.chats.ensure(CHAT)
        result = await one.run("open('/app/shared/a', 'w').write('x')", fence=7)
        assert result.stop_type is StopType.ERROR
        assert "not kept" in str(result.error)
        assert CHAT in str(result.error)
        assert await one.area() is None

        await one.run("open('/app/shared/a', 'w').write('x')")
        # Within the limit of what may be on the disk: the quota allows some more names there.
        async with database.begin() as tx:
            await tx.files.commit(f"shared/{BOX}", put=[], removed=["a"])
        result = await one.run("[open(f'/app/shared/{n}', 'w') for n in range(9)]")
        assert (result.stop_type, result.limit) == (StopType.ERROR, Limit.DISK)


async def test_links_are_left_out_and_named(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    result = await one.run("import os; os.symlink('/etc', 'shared/link'); open('shared/a', 'w').write('x')")
    assert result.output == "[not kept in /app/shared: 'link': it is neither a file nor a directory]\n"
    result = await two.run("import os; print(os.listdir('/app/shared'))")
    assert result.output == "['a']\n"


async def test_who_follows_the_output_of_a_run_reads_what_is_not_kept(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines
    followed: list[str] = []
    asked = request("import os; print('begun'); os.symlink('/etc', '/app/shared/link')")
    result = await one.manager.run(replace(asked, on_output=followed.append))
    assert "".join(followed) == result.output
    assert result.output.startswith("begun\n[not kept in /app/shared: 'link'")


async def test_a_call_that_fails_names_what_its_method_does_not_see(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines

    async def read(call: StubCall) -> StubResult:
        return Raised(error_type="FileNotFoundError", message="there is no /app/shared/link")

    code = """
import os
open('/app/shared/a', 'w').write('x')
if {links}:
    os.symlink('a', '/app/shared/link')
try:
    read()
except Exception as exc:
    print(exc)
os.remove('/app/shared/link') if {links} else None
"""
    result = await one.run(code.format(links=True), method("read"), dispatch=read)
    assert "methods do not see in /app/shared: 'link': it is neither a file nor a directory" in result.output
    assert "not kept" not in result.output
    result = await one.run(code.format(links=False), method("read"), dispatch=read)
    assert "no /app/shared/link" in result.output and "do not see" not in result.output


async def test_a_store_that_fails_is_an_error_of_the_call_and_of_the_run(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, two = machines
    await one.run("open('/app/shared/a', 'w').write('x')")
    objects = tmp_path / "objects"
    objects.rename(tmp_path / "away")
    objects.write_text("no directory")

    async def never(call: StubCall) -> StubResult:
        raise AssertionError("the call was made")

    code = """
open('/app/shared/a', 'w').write('y')
try:
    never()
except Exception as exc:
    print(exc)
"""
    result = await one.run(code, method("never"), dispatch=never)
    assert "the call was not made" in result.output
    assert (result.stop_type, result.limit) == (StopType.ERROR, None)
    assert "not kept" in str(result.error)
    assert str(tmp_path) not in f"{result.output}{result.error}"
    objects.unlink()
    (tmp_path / "away").rename(objects)
    assert (await two.run("print(open('/app/shared/a').read())")).output == "x\n"
    assert (await one.run("print(open('/app/shared/a').read())")).output == "x\n"


async def test_prefetched_areas_are_there_before_the_run(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    await one.run("open('/app/shared/a', 'w').write('x')")
    two.areas.prefetch(CHAT, BOX)
    await eventually((two.shared / "a").exists, what="the file of the other machine")


async def test_a_run_commits_under_its_fence(machines: tuple[Machine, Machine]) -> None:
    one, _ = machines
    async with one.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        fence = await tx.chats.acquire(CHAT, owner="one", lease_seconds=60)
    assert fence is not None
    result = await one.run("open('/app/shared/a', 'w').write('x')", fence=fence)
    assert result.error is None
    assert await one.area() is not None


def test_images_of_shared_files_are_refused_with_a_store() -> None:
    with pytest.raises(SettingsError, match="NEKRO_FILES__URL"):
        Settings.load(
            env_file=None,
            files=FileSettings(url="s3://bucket/x"),
            sandbox=SandboxSettings(shared_storage="image"),
        )


@pytest.mark.parametrize("count", [3_000, pytest.param(100_000, marks=pytest.mark.extended)])
async def test_a_program_that_leaves_far_too_many_names_stays_within_its_quota(
    count: int, database: Database, tmp_path: Path
) -> None:
    objects = tmp_path / "objects"
    async with (
        started(tmp_path / "one", database, objects, shared_files=1_000) as one,
        started(tmp_path / "two", database, objects, shared_files=1_000) as two,
    ):
        await one.run("open('/app/shared/kept', 'w').write('text')")
        code = f"""
import os
for number in range({count}):
    name = f'/app/shared/{{number}}'
    open(name, 'w').close() if number % 3 else os.symlink('kept', name)
os.symlink('/etc/passwd', '/app/shared/link')
os.link('/app/shared/1', '/app/shared/second')
"""
        result = await one.run(code)
        assert result.stop_type is StopType.ERROR and result.limit is Limit.DISK, result
        area = await one.area()
        assert area is not None and area.names <= 1_000
        listing = """
import os
files = [name for name in os.listdir('shared') if not os.path.islink(f'shared/{name}')]
print(open('/app/shared/kept').read(), len(files))
"""
        found = [await host.run(listing) for host in (two, one, two)]
        assert [result.output for result in found] == [f"text {area.names}\n"] * 3, found
