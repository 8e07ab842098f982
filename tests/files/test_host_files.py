"""Uses of areas: several on a host at once, and on hosts that share no disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hosts import opened

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import DamagedFileError, FilesQuotaError, StorageUnavailableError
from storage.engine import Database
from storage.files import host_files
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.manifest import UNLIMITED, AreaLimits
from storage.files.stores.directory import DirectoryStore


class Machine:
    """A host and its directory of one area."""

    def __init__(self, root: Path, database: Database, objects: Path) -> None:
        self.root = root
        self.directory = root / "shared" / "box"
        self.files = HostFiles(database, DirectoryStore(objects), root=root / "files", cache_bytes=1 << 30)

    def place(self, *, forgets: bool = True, limits: AreaLimits = UNLIMITED) -> AreaPlace:
        return AreaPlace(name="shared/box", directory=self.directory, forgets=forgets, limits=limits)

    async def empty_unused(self, unused: timedelta) -> int:
        return await self.files.empty_unused("shared", self.directory.parent, unused=unused)

    def texts(self) -> dict[str, str]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_text() for path in paths}

    def write(self, path: str, text: str) -> None:
        (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / path).write_text(text)


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
def machines(database: Database, tmp_path: Path) -> tuple[Machine, Machine]:
    one, two = (Machine(tmp_path / name, database, tmp_path / "objects") for name in ("one", "two"))
    return one, two


async def test_a_program_and_a_method_on_another_host_see_each_others_files(
    machines: tuple[Machine, Machine],
) -> None:
    host, other = machines
    async with host.files.use(host.place()) as program:
        host.write("data.csv", "1,2")
        host.write("old/notes", "x")
        await program.push()
        async with other.files.use(other.place()) as method:
            assert other.texts() == {"data.csv": "1,2", "old/notes": "x"}
            other.write("plot/a.png", "png")
            other.write("data.csv", "3,4")
            (other.directory / "old/notes").unlink()
            (other.directory / "old").rmdir()
            await method.push()
        host.write("meanwhile", "mine")
        await program.pull()
        assert host.texts() == {"data.csv": "3,4", "plot/a.png": "png", "meanwhile": "mine"}
        assert not (host.directory / "old").exists()
        await program.push()
    async with other.files.use(other.place()):
        assert other.texts() == host.texts()


async def test_a_pull_keeps_what_a_program_has_changed(machines: tuple[Machine, Machine]) -> None:
    host, other = machines
    async with host.files.use(host.place()) as program:
        for name in ("both", "deleted there", "deleted here", "kind"):
            host.write(name, "old")
        await program.push()
        async with other.files.use(other.place()) as method:
            for name in ("both", "new in both", "deleted here"):
                other.write(name, "theirs")
            (other.directory / "deleted there").unlink()
            (other.directory / "kind").unlink()
            other.write("kind/inner", "theirs")
            await method.push()
        host.write("both", "mine")
        host.write("new in both", "mine")
        host.write("deleted there", "mine")
        (host.directory / "deleted here").unlink()
        await program.pull()
        await program.push()
    assert host.texts() == {
        "both": "mine", "new in both": "mine", "deleted there": "mine", "kind/inner": "theirs"
    }  # fmt: skip
    async with other.files.use(other.place()):
        assert other.texts() == host.texts()


async def test_what_a_dead_user_left_is_undone_unless_another_still_runs(
    machines: tuple[Machine, Machine],
) -> None:
    host, _ = machines
    async with host.files.use(host.place()) as first:
        host.write("kept", "1")
        await first.push()
        host.write("half", "1")
        async with host.files.use(host.place()):
            assert host.texts() == {"kept": "1", "half": "1"}
    async with host.files.use(host.place(forgets=False)):
        assert host.texts() == {"kept": "1", "half": "1"}
    async with host.files.use(host.place()):
        assert host.texts() == {"kept": "1"}


async def test_another_process_of_the_host_uses_the_same_directory(
    machines: tuple[Machine, Machine], database: Database, tmp_path: Path
) -> None:
    host, other = machines
    again = Machine(tmp_path / "one", database, tmp_path / "objects")
    async with host.files.use(host.place()) as program, again.files.use(again.place()) as method:
        host.write("a", "1")
        again.write("b", "2")
        await method.push()
        await program.push()
        async with other.files.use(other.place()) as third:
            assert other.texts() == {"a": "1", "b": "2"}
            other.write("c", "3")
            await third.push()
        await asyncio.gather(program.pull(), method.pull())
        assert host.texts() == {"a": "1", "b": "2", "c": "3"}


async def test_a_push_that_is_refused_changes_nothing_and_may_be_repeated(
    machines: tuple[Machine, Machine],
) -> None:
    host, other = machines
    async with host.files.use(host.place(limits=AreaLimits(bytes=4))) as program:
        host.write("a", "12345")
        with pytest.raises(FilesQuotaError):
            await program.push()
        host.write("a", "1234")
        await program.push()
    async with other.files.use(other.place()):
        assert other.texts() == {"a": "1234"}


async def test_a_pull_that_fails_in_the_middle_is_completed_by_the_next(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    host, other = machines
    async with host.files.use(host.place()) as program, other.files.use(other.place()) as method:
        for number in range(20):
            host.write(f"f{number:02}", f"content {number}")
        await program.push()
        objects = sorted(path for path in (tmp_path / "objects").rglob("*") if path.is_file())
        moved = [(path, path.with_name(path.name + ".away")) for path in objects[::2]]
        for path, away in moved:
            os.rename(path, away)
        with pytest.raises(DamagedFileError, match="shared/box/f"):
            await method.pull()
        for path, away in moved:
            os.rename(away, path)
        await method.pull()
        assert other.texts() == host.texts()
        other.write("f00", "changed")
        await method.push()
        await program.pull()
        assert host.texts()["f00"] == "changed"


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_pull_brings_files_in_place_of_directories_and_directories_in_place_of_files(
    refuses: bool, machines: tuple[Machine, Machine]
) -> None:
    places = [replace(host.place(forgets=False), refuses=refuses) for host in machines]
    one, two = machines
    async with one.files.use(places[0]) as used:
        one.write("d/x", "1")
        one.write("f", "1")
        await used.push()
        async with two.files.use(places[1]) as other:
            (one.directory / "d/x").unlink()
            (one.directory / "d").rmdir()
            one.write("d", "a file")
            (one.directory / "f").unlink()
            one.write("f/y", "2")
            await used.push()
            await other.pull()
            assert two.texts() == {"d": "a file", "f/y": "2"}
            assert (await other.push()).area is None


async def test_a_directory_with_new_files_is_not_replaced_by_a_file(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    async with one.files.use(one.place()) as used, two.files.use(two.place()) as other:
        one.write("d/x", "1")
        await used.push()
        await other.pull()
        two.write("d/new", "2")
        (one.directory / "d/x").unlink()
        (one.directory / "d").rmdir()
        one.write("d", "a file")
        await used.push()
        await other.pull()
        assert two.texts() == {"d/new": "2"}
        await other.push()  # the last change wins
        await used.pull()
        assert one.texts() == {"d/new": "2"}


@pytest.mark.parametrize("change", ["adds", "replaces", "differs in case"])
async def test_a_run_keeps_its_files_when_others_change_the_directory_that_it_changes(
    change: str, machines: tuple[Machine, Machine]
) -> None:
    one, two = machines
    async with one.files.use(one.place()) as used, two.files.use(two.place()) as other:
        one.write("d/old", "1")
        await used.push()
        await other.pull()
        one.write("result", "1")
        match change:
            case "adds":
                two.write("d/new", "2")
                (one.directory / "d/old").unlink()
                (one.directory / "d").rmdir()
                expected = {"result": "1", "d/new": "2"}
            case "replaces":
                (two.directory / "d/old").unlink()
                (two.directory / "d").rmdir()
                two.write("d", "a file")
                one.write("d/new", "2")
                expected = {"result": "1", "d/new": "2"}
            case _:
                one.write("readme", "1")
                two.write("README", "2")
                expected = {"result": "1", "README": "2", "d/old": "1"}
        await other.push()
        pushed = await used.push()
        await other.pull()
        assert two.texts() == expected
        assert [*pushed.left_out] == (["'readme'"] if change == "differs in case" else [])


NOW = timedelta(0)


async def test_a_directory_that_is_not_used_is_removed_and_brought_again(
    machines: tuple[Machine, Machine],
) -> None:
    host, _ = machines
    async with host.files.use(host.place()) as used:
        host.write("d/a.txt", "1")
        await used.push()
        assert await host.empty_unused(NOW) == 0
    assert await host.empty_unused(timedelta(hours=1)) == 0
    assert host.texts() == {"d/a.txt": "1"}
    assert await host.empty_unused(NOW) == 1
    assert [*host.directory.iterdir()] == [] and await host.empty_unused(NOW) == 0
    async with host.files.use(host.place()) as used:
        assert host.texts() == {"d/a.txt": "1"}
        assert (await used.push()).area is None


async def test_the_idle_time_of_a_directory_counts_from_the_end_of_its_last_use(
    machines: tuple[Machine, Machine],
) -> None:
    host, _ = machines
    async with host.files.use(host.place()) as used:
        host.write("a", "1")
        await used.push()
        for lock in (host.root / "files" / "areas").glob("*.using"):
            os.utime(lock, (0, 0))
    assert await host.empty_unused(timedelta(hours=1)) == 0


async def test_what_another_process_uses_is_not_removed(
    machines: tuple[Machine, Machine], database: Database, tmp_path: Path
) -> None:
    host, _ = machines
    again = Machine(tmp_path / "one", database, tmp_path / "objects")
    async with host.files.use(host.place()) as program:
        host.write("a", "1")
        await program.push()
        assert await again.empty_unused(NOW) == 0
        async with again.files.use(again.place()):
            assert again.texts() == {"a": "1"}
    # What a process knows of a directory that another has removed is read again.
    assert await again.empty_unused(NOW) == 1
    async with host.files.use(host.place()):
        assert host.texts() == {"a": "1"}


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from broker_config.settings import DatabaseSettings
from hosts import opened
from test_host_files import Machine

async def main(url, root):
    async with opened(DatabaseSettings(url=url), root) as database:
        host = Machine(root / "one", database, root / "objects")
        async with host.files.use(host.place()) as used:
            host.write("kept", "changed")
            host.write("half", "new")
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.mark.parametrize("forgets", [True, False])
async def test_what_a_killed_process_has_not_committed_is_not_removed(
    machines: tuple[Machine, Machine], database: Database, tmp_path: Path, forgets: bool
) -> None:
    host, _ = machines
    async with host.files.use(host.place()) as used:
        host.write("kept", "1")
        await used.push()
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(database.settings.url), str(tmp_path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert await killed.wait() == -signal.SIGKILL
    left = {"kept": "changed", "half": "new"}
    assert await host.empty_unused(NOW) == 0
    assert host.texts() == left
    async with host.files.use(host.place(forgets=forgets)) as used:
        assert host.texts() == ({"kept": "1"} if forgets else left)
        await used.push()
    assert await host.empty_unused(NOW) == 1


async def test_a_directory_that_cannot_be_emptied_does_not_keep_others(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = machines
    for name in ("box", "other"):
        place = AreaPlace(name=f"shared/{name}", directory=host.directory.with_name(name))
        async with host.files.use(place) as used:
            (place.directory / "a").write_text("1")
            await used.push()
    area = host.root / "files" / "areas"
    (broken,) = (path for path in area.glob("*.json") if host.files._file_of(host.place()).name == path.stem)
    broken.unlink()
    broken.mkdir()  # its state cannot be read
    assert await host.empty_unused(NOW) == 1
    assert not (host.directory.with_name("other") / "a").exists() and host.texts() == {"a": "1"}


async def test_a_stopped_process_of_the_host_is_not_waited_for_without_end(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = machines
    async with host.files.use(host.place()):
        pass
    (lock,) = (host.root / "files" / "areas").glob("*.changing")
    code = f"import fcntl; f = open({str(lock)!r}, 'w'); fcntl.flock(f, 2); print(flush=True); input()"
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, **pipes)
    assert holder.stdout is not None and await holder.stdout.readline()
    holder.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr(host_files, "_HELD_SECONDS", 0.5)
        with pytest.raises(StorageUnavailableError, match=f"has used {lock} for 0.5 s: `fuser` names it"):
            async with host.files.use(host.place()):
                pass
    finally:
        holder.kill()
        await holder.communicate()
    async with host.files.use(host.place()) as use:
        host.write("a", "x")
        await use.push()
