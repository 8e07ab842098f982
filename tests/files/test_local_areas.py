"""Directories of hosts that share no disk: what one leaves, another has."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from faulty_store import Faults, FaultyStore
from hosts import AREA, Host, opened
from s3_process import BUCKET

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import (
    DamagedFileError,
    FencedError,
    FilesQuotaError,
    InvalidValueError,
    StorageError,
    StorageUnavailableError,
)
from nekro_agent.files.private_files import open_unnamed
from nekro_agent.files.uploads import UploadArea
from storage.engine import Database
from storage.files.manifest import AreaLimits, Writer
from storage.files.stores.bucket import BucketStore
from storage.files.stores.store import PART_BYTES, ObjectStore


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
def hosts(database: Database, store: ObjectStore, tmp_path: Path) -> tuple[Host, Host]:
    """Two hosts, on each kind of store."""
    return Host(tmp_path / "one", database, store), Host(tmp_path / "two", database, store)


@pytest.fixture
def host(database: Database, tmp_path: Path) -> Host:
    """A host on a directory, for what the store does not decide."""
    from storage.files.stores.directory import DirectoryStore

    return Host(tmp_path / "host", database, DirectoryStore(tmp_path / "objects"))


async def test_a_host_has_what_another_has_left(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    area = one.area()
    assert await area.restore() is None
    one.write("plot.txt", "plot")
    one.write("data/日本.csv", "1,2")
    script = one.write("data/run.sh", "#!/bin/sh")
    script.chmod(0o755)
    (one.directory() / "empty").mkdir()
    pushed = await area.push()
    assert pushed.area is not None and pushed.area.version == 1 and not pushed.left_out

    await two.area().restore()
    assert two.files() == one.files() and (two.directory() / "empty").is_dir()
    copied = two.directory() / "data/run.sh"
    assert copied.stat().st_mode & 0o111 and copied.stat().st_mtime_ns == script.stat().st_mtime_ns

    # A change in place, a deletion, and a file in place of a directory.
    other = two.area()
    await other.restore()
    two.write("plot.txt", "PLOT")
    (two.directory() / "data/日本.csv").unlink()
    (two.directory() / "empty").rmdir()
    two.write("empty", "no longer a directory")
    await other.push()
    await one.area().restore()
    assert one.files() == two.files() == {
        "plot.txt": "PLOT", "data/run.sh": "#!/bin/sh", "empty": "no longer a directory"
    }  # fmt: skip


async def test_a_content_larger_than_an_object_arrives_whole(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    data = os.urandom(1 << 20) * 35
    area = one.area()
    await area.restore()
    (one.directory() / "model.bin").write_bytes(data)
    await area.push()
    await two.area().restore()
    assert (two.directory() / "model.bin").read_bytes() == data
    assert len(data) > 2 * PART_BYTES


async def test_a_write_in_place_changes_neither_the_cache_nor_other_areas(host: Host) -> None:
    first, second = host.area(), host.area("shared/other")
    for area, name in ((first, AREA), (second, "shared/other")):
        await area.restore()
        host.write("x", "same", name)
        await area.push()
    again = host.area()
    await again.restore()
    file = host.directory() / "x"
    before = file.stat()
    with file.open("r+") as opened_file:
        opened_file.write("SAME")
    # Of the same size, and with its old time.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    await again.push()
    (host.directory("shared/other") / "x").unlink()
    await host.area("shared/other").restore()
    assert host.files("shared/other") == {"x": "same"}
    (host.directory() / "x").unlink()
    await host.area().restore()
    assert host.files() == {"x": "SAME"}


async def test_what_a_killed_run_left_is_replaced_by_the_version(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("kept", "1")
    host.write("d/changed", "1")
    await area.push()
    await host.area().restore()
    host.write("d/changed", "half")
    host.write("d/e/new", "half")
    (host.directory() / "kept").unlink()
    (host.directory() / "link").symlink_to("/etc/passwd")
    os.mkfifo(host.directory() / "pipe")
    await host.area().restore()
    assert host.files() == {"kept": "1", "d/changed": "1"}
    assert sorted(os.listdir(host.directory())) == ["d", "kept"] and os.listdir(host.directory() / "d") == [
        "changed"
    ]


async def test_an_unchanged_file_is_not_copied_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "1")
    await area.push()
    inode = (host.directory() / "a").stat().st_ino
    await host.area().restore()
    assert (host.directory() / "a").stat().st_ino == inode
    assert (await area.push()).area is None


async def test_a_file_with_another_mode_or_owner_makes_no_version(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = host.area()
    await area.restore()
    file = host.write("a.txt", "text")
    before = (await area.push()).area
    file.chmod(0o640)
    monkeypatch.setattr(host.contents, "put", None)
    assert (await area.push()).area is None
    monkeypatch.setattr(host.contents.cache, "add", None)  # it is known now, and not read again
    assert (await area.push()).area is None
    assert await area.pull() == before


async def test_what_an_area_cannot_have_is_left_out_and_named(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("kept", "1")
    host.write("Readme", "1")
    host.write("readme", "2")
    os.link(host.directory() / "kept", host.directory() / "second")
    (host.directory() / "secret").symlink_to("/etc/passwd")
    os.mkfifo(host.directory() / "pipe")
    (host.directory() / os.fsdecode(b"bad\xff")).mkdir()
    (host.directory() / os.fsdecode(b"bad\xff") / "inner").write_text("1")
    host.write("good", "1")
    pushed = await area.push()
    assert set(pushed.left_out) == {
        "'kept'", "'second'", "'readme'", "'secret'", "'pipe'", r"'bad\udcff'", r"'bad\udcff/inner'"
    }  # fmt: skip
    assert pushed.area is not None and pushed.area.names == 2


async def test_uploads_and_downloads_that_are_not_finished_are_in_no_version(host: Host) -> None:
    area = host.area()
    await area.restore()
    uploads = UploadArea(host.directory())
    uploads.new_download().write_text("1")
    for name in (f".{'0a' * 8}.part", f".model.bin.{'0a' * 6}.part.json", f".model.bin.{'0a' * 6}.part"):
        host.write(name, "1")
    uploads.put("done", b"1")
    pushed = await area.push()
    assert pushed.area is not None and pushed.area.names == 1 and pushed.left_out == {}


async def test_a_holder_that_lost_the_chat_leaves_the_old_version(host: Host) -> None:
    async with host.database.begin() as tx:
        await tx.chats.ensure("chat")
        fence = await tx.chats.acquire("chat", owner="one", lease_seconds=60)
    assert fence is not None
    area = host.area()
    await area.restore()
    host.write("a", "1")
    await area.push(writer=Writer(chat_key="chat", fence=fence))
    host.write("a", "2")
    with pytest.raises(FencedError):
        await area.push(writer=Writer(chat_key="chat", fence=fence - 1))
    await host.area().restore()
    assert host.files() == {"a": "1"}


async def test_a_run_that_exceeds_the_quota_leaves_the_old_version(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "12345")
    await area.push(limits=AreaLimits(bytes=5))
    host.write("b", "1")
    with pytest.raises(FilesQuotaError, match="6 bytes"):
        await area.push(limits=AreaLimits(bytes=5))
    await host.area().restore()
    assert host.files() == {"a": "12345"}


async def test_an_altered_or_missing_object_is_an_error_that_names_the_file(
    database: Database, tmp_path: Path
) -> None:
    from storage.files.stores.directory import DirectoryStore

    objects = tmp_path / "objects"
    one, two = (Host(tmp_path / name, database, DirectoryStore(objects)) for name in ("one", "two"))
    area = one.area()
    await area.restore()
    one.write("d/a.txt", "right")
    await area.push()
    (stored,) = (path for path in objects.rglob("*") if path.is_file())
    stored.write_bytes(b"wrong")
    with pytest.raises(DamagedFileError, match=r"shared/box/d/a\.txt"):
        await two.area().restore()
    stored.unlink()
    with pytest.raises(DamagedFileError, match="no such object"):
        await two.area().restore()
    assert two.files() == {}


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "a/../../outside"])
async def test_a_manifest_with_a_path_outside_of_the_area_writes_nothing(host: Host, path: str) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "1")
    await area.push()
    async with host.database.begin() as tx:
        await tx.connection.exec_driver_sql("UPDATE file_entries SET path = ?", (path,))
    with pytest.raises(InvalidValueError, match="outside"):
        await host.area().restore()
    assert host.files() == {"a": "1"} and not (host.root / "areas/shared/outside").exists()


async def test_a_link_in_place_of_a_directory_is_not_followed(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("theirs")
    area = host.area()
    await area.restore()
    host.write("d/x", "1")
    await area.push()
    (host.directory() / "d/x").unlink()
    (host.directory() / "d").rmdir()
    (host.directory() / "d").symlink_to(outside)
    await host.area().restore()
    assert host.files() == {"d/x": "1"} and not (host.directory() / "d").is_symlink()
    assert (outside / "x").read_text() == "theirs"


async def test_changes_are_unknown_before_a_pull(host: Host) -> None:
    with pytest.raises(StorageError, match="has not been pulled"):
        await host.area().push()


async def test_the_cache_stays_within_its_bound(database: Database, tmp_path: Path) -> None:
    from storage.files.stores.directory import DirectoryStore

    host = Host(tmp_path / "host", database, DirectoryStore(tmp_path / "objects"), cache_bytes=10_000)
    area = host.area()
    await area.restore()
    for number in range(40):
        host.write(f"f{number}", f"{number}" * 500)
        await area.push()
    assert host.cache.shrink(1 << 30) <= 10_000 + 1000
    (host.directory() / "f0").unlink()
    await host.area().restore()
    assert len(host.files()) == 40


async def test_what_was_just_used_stays_in_the_cache(database: Database, tmp_path: Path) -> None:
    from storage.files.stores.directory import DirectoryStore

    store = DirectoryStore(tmp_path / "objects")
    host = Host(tmp_path / "host", database, store, cache_bytes=1000, in_use=timedelta(minutes=10))
    area = host.area()
    await area.restore()
    for number in range(10):
        host.write(f"f{number}", f"{number}" * 500)
    await area.push()
    assert host.cache.shrink(0) == 5000


async def test_a_store_that_fails_in_the_middle_leaves_the_old_version_and_a_repetition_resumes(
    faulty: FaultyStore, database: Database, tmp_path: Path
) -> None:
    store = BucketStore(f"s3://{BUCKET}/{tmp_path.name}", patience=timedelta(seconds=0.2))
    one, two = (Host(tmp_path / name, database, store) for name in ("one", "two"))
    area = one.area()
    await area.restore()
    one.write("a", "old")
    await area.push()
    for number in range(12):
        one.write(f"f{number}", f"new {number}")
    one.write("a", "new")
    passed = iter(range(5))
    faulty.faults = Faults(refuses=lambda method, _target: method == "PUT" and next(passed, None) is None)
    with pytest.raises(StorageUnavailableError, match="503"):
        await area.push()
    await two.area().restore()
    assert two.files() == {"a": "old"}
    faulty.faults = Faults()
    before = faulty.passed["PUT"]
    await area.push()
    assert faulty.passed["PUT"] - before == 13 - 5
    await two.area().restore()
    assert two.files() == one.files() and len(two.files()) == 13


async def test_two_hosts_that_change_other_files_at_once_both_succeed(hosts: tuple[Host, Host]) -> None:
    areas = [host.area() for host in hosts]
    for area in areas:
        await area.restore()
    for number, host in enumerate(hosts):
        host.write(f"of-{number}", f"{number}")
        host.write("same", "equal")
    await asyncio.gather(*(area.push() for area in areas))
    for host in hosts:
        await host.area().restore()
        assert host.files() == {"of-0": "0", "of-1": "1", "same": "equal"}


async def test_a_full_disk_is_an_error_and_makes_room_in_the_cache(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "12345")
    await area.push()
    with (
        pytest.raises(StorageUnavailableError, match="is full"),
        host.cache.new_file() as file,
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        file.write(b"half")
        full.write(b"half")
    assert host.cache.shrink(1 << 30) == 0 and not list((host.root / "files-cache").glob(".*"))
    (host.directory() / "a").unlink()
    await host.area().restore()
    assert host.files() == {"a": "12345"}


async def test_files_from_before_the_store_become_the_first_version(
    database: Database, store: ObjectStore, tmp_path: Path
) -> None:
    old, other = Host(tmp_path / "old", database, store), Host(tmp_path / "other", database, store)
    old.write("notes.txt", "kept")
    adopted = await old.area().restore()
    assert adopted is not None and (adopted.version, adopted.names) == (1, 1)
    for host in (old, other):  # also on its own host, where a later use undoes what was not committed
        await host.area().restore()
        assert host.files() == {"notes.txt": "kept"}


async def test_files_from_before_the_store_stay_if_they_cannot_be_stored_at_first(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage.files.stores.directory import DirectoryStore

    host = Host(tmp_path / "host", database, DirectoryStore(tmp_path / "objects"))
    host.write("notes.txt", "kept")

    async def refuse(*_: object) -> None:
        raise StorageUnavailableError("the bucket does not answer")

    with monkeypatch.context() as away:
        away.setattr(DirectoryStore, "put", refuse)
        for _ in range(2):
            with pytest.raises(StorageUnavailableError):
                await host.area().restore()
    for _ in range(2):
        await host.area().restore()
        assert host.files() == {"notes.txt": "kept"}


async def test_what_a_killed_run_left_in_a_new_area_is_removed(
    database: Database, store: ObjectStore, tmp_path: Path
) -> None:
    host = Host(tmp_path, database, store)
    await host.area().restore()
    host.write("half.txt", "never committed")
    await host.area().restore()
    assert host.files() == {}


def test_a_file_without_a_name_is_taken_over_and_others_are_copied(host: Host, tmp_path: Path) -> None:
    host.root.mkdir()
    named, deleted = tmp_path / "named", tmp_path / "deleted"
    for path in (named, deleted):
        path.write_bytes(b"of a program")
    with open_unnamed(host.root) as own, named.open("rb") as other, deleted.open("r+b") as gone:
        own.write(b"own")
        own.seek(0)
        deleted.unlink()
        adopted = [host.cache.adopt(file) for file in (own, other, gone)]
        assert adopted[0].path.stat().st_ino == os.fstat(own.fileno()).st_ino
        assert adopted[0].path.stat().st_mode & 0o777 == 0o600 and adopted[0].path.stat().st_nlink == 1
        gone.write(b"changed")
    named.write_bytes(b"changed, too")  # in place, as the program that has it open could
    assert [one.path.read_bytes() for one in adopted] == [b"own", b"of a program", b"of a program"]
    assert adopted[0].sha256 == hashlib.sha256(b"own").hexdigest()
    assert not [*(host.root / "files-cache").glob(".*")]
