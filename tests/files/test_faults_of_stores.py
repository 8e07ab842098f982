"""Stores that refuse, are slow, lose answers, cut connections, do not answer; and disks that are full."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from faulty_store import Faults, FaultyStore
from hosts import Host, opened
from nekro_shell import open_shell
from s3_process import BUCKET, variables_of

from broker_config.settings import DatabaseSettings
from nekro.cli.doctor import file_checks
from nekro.cli.running import ExitCode
from nekro.cli.views import file_store
from nekro_agent.errors import StorageUnavailableError
from storage.engine import Database
from storage.files.collection import check, collect
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.stores.bucket import BucketStore
from storage.files.stores.directory import DirectoryStore
from storage.files.stores.store import PART_BYTES


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


def every(count: int, method: str = "") -> Callable[[str, str], bool]:
    """Apply to one of so many requests, of a method or of all; never to the same twice."""
    seen: Counter[tuple[str, str]] = Counter()
    numbers = itertools.count(1)

    def applies(of: str, target: str) -> bool:
        seen[of, target] += 1
        return method in ("", of) and seen[of, target] == 1 and next(numbers) % count == 0

    return applies


FAULTS = {
    "refuses": Faults(refuses=every(2)),
    "loses_answer": Faults(loses_answer=every(2)),
    "repeats": Faults(repeats=every(2)),
    "cuts": Faults(cuts=every(2, "GET")),
    "all": Faults(refuses=every(3), loses_answer=every(4), repeats=every(5), cuts=every(7, "GET")),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "all" else pytest.param(kind, marks=pytest.mark.extended) for kind in FAULTS]
)
async def test_files_arrive_whole_from_a_store_with_faults(
    kind: str, faulty: FaultyStore, database: Database, tmp_path: Path
) -> None:
    store = BucketStore(f"s3://{BUCKET}/{tmp_path.name}")
    one, two = (Host(tmp_path / name, database, store) for name in ("one", "two"))
    faulty.faults = FAULTS[kind]
    area = one.area()
    await area.restore()
    for number in range(12):
        one.write(f"f{number}", f"{number}" * 100_000)
    large = os.urandom(1 << 20) * 17
    (one.directory() / "large").write_bytes(large)
    await area.push()
    await two.area().restore()
    assert (two.directory() / "large").read_bytes() == large > bytes(PART_BYTES)
    assert [(two.directory() / f"f{number}").stat().st_size for number in (0, 11)] == [100_000, 200_000]
    (one.directory() / "f3").unlink()
    one.write("f4", "changed")
    await area.push()
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql("DELETE FROM file_entries WHERE until IS NOT NULL")
    # The library repeats a request for an object whose answer is cut off, but not one for a listing.
    faulty.faults = replace(faulty.faults, cuts=lambda _method, _target: False)
    done = await collect(database, store, grace=timedelta(seconds=-1))
    assert done.contents == 2
    assert (await check(database, store, reads=True)).damages == []
    await two.area().restore()
    assert two.directory().joinpath("f4").read_text() == "changed" and len(os.listdir(two.directory())) == 12


async def test_a_push_does_not_try_each_file_while_the_store_is_down(
    faulty: FaultyStore, database: Database, tmp_path: Path
) -> None:
    store = BucketStore(f"s3://{BUCKET}/{tmp_path.name}", patience=timedelta(seconds=0.2))
    host = Host(tmp_path / "host", database, store)
    area = host.area()
    await area.restore()
    for number in range(60):
        host.write(f"f{number}", f"{number}")
    tried: set[str] = set()

    def refuses(_method: str, target: str) -> bool:
        tried.add(target)
        return True

    faulty.faults = Faults(refuses=refuses)
    with pytest.raises(StorageUnavailableError, match="store object"):
        await area.push()
    assert len(tried) <= 16
    faulty.faults = Faults()
    assert (await area.push()).area is not None


async def test_a_content_that_leaves_the_cache_before_it_is_stored_is_an_error(
    database: Database, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", database, DirectoryStore(tmp_path / "objects"))
    area = host.area()
    await area.restore()
    host.write("a", "1")
    with (host.directory() / "a").open("rb") as file:
        content = host.cache.add(file)
    content.path.unlink()
    with pytest.raises(StorageUnavailableError, match="was removed from the cache"):
        await host.contents.put([content])
    await area.push()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("what", ["cache", "directory"])
async def test_a_full_disk_is_an_error_that_names_the_file_and_the_fix(
    what: str, small_disk: Path, database: Database, tmp_path: Path
) -> None:
    store = DirectoryStore(tmp_path / "objects")
    other = HostFiles(database, store, root=tmp_path / "other", cache_bytes=1 << 30)
    theirs = AreaPlace(name="shared/box", directory=tmp_path / "theirs")
    async with other.use(theirs) as use:
        (theirs.directory / "small").write_text("small")
        (theirs.directory / "large").write_bytes(os.urandom(2 << 20))
        await use.push()
    root, directory = tmp_path / "files", small_disk / "box"
    if what == "cache":
        root, directory = small_disk / "files", tmp_path / "box"
    files = HostFiles(database, store, root=root, cache_bytes=1 << 30)
    place = AreaPlace(name="shared/box", directory=directory)
    for _ in range(2):
        with pytest.raises(StorageUnavailableError, match="free space on") as full:
            async with files.use(place):
                pass
        assert str(small_disk) in str(full.value)
        # Files are written side by side, so the one that finds no place may be the small one.
        assert what == "cache" or re.search("shared/box/(large|small) cannot be written", str(full.value))
    async with other.use(theirs) as use:
        (theirs.directory / "large").write_text("smaller")
        await use.push()
    async with files.use(place) as use:
        assert (directory / "large").read_text() == "smaller"
        # What this host adds does not fit either, and nothing of it is committed.
        with (
            pytest.raises(OSError, match="No space")
            if what == "directory"
            else pytest.raises(StorageUnavailableError, match="free space on")
        ):
            (directory / "new").write_bytes(os.urandom(2 << 20))
            await use.push()
        (directory / "new").write_text("fits")
        await use.push()
    async with other.use(theirs):
        assert (theirs.directory / "new").read_text() == "fits"


def test_commands_name_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in file_checks, file_store:
        monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=0.5))
    with open_shell({}) as shell, socket.create_server(("127.0.0.1", 0)) as silent:
        shell.environment["NEKRO_FILES__URL"] = f"file://{tmp_path}"
        assert shell.inside("db", "upgrade").code == 0
        file = shell.data_dir / "uploads" / "chat" / "a.txt"
        file.parent.mkdir(parents=True)
        file.write_text("text")
        assert shell.inside("files", "import").code == 0
        shell.environment["NEKRO_FILES__URL"] = f"s3://{BUCKET}/silent"
        for name, value in variables_of(f"http://127.0.0.1:{silent.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)  # which the library reads
        shown = shell.inside("doctor").out
        assert "✗ files: cannot store object" in shown and "correct NEKRO_FILES__URL" in shown
        checked = shell.inside("files", "fsck")
        assert checked.code == ExitCode.STORAGE and "cannot find object" in checked.err
        assert "Traceback" not in checked.err
