"""Hostile programs, manifests and stores: nothing is written elsewhere, served altered, or lost silently."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hosts import AREA, Host, opened

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import DamagedFileError, FilesQuotaError, NekroError
from storage.engine import Database
from storage.files import local_area, scan
from storage.files.host_files import AreaPlace, HostFiles
from storage.files.manifest import AreaLimits, Entry
from storage.files.stores.directory import DirectoryStore
from storage.files.stores.store import PART_BYTES, ObjectStore


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
def hosts(database: Database, tmp_path: Path) -> tuple[Host, Host]:
    store = DirectoryStore(tmp_path / "objects")
    return Host(tmp_path / "one", database, store), Host(tmp_path / "two", database, store)


@pytest.fixture
def host(hosts: tuple[Host, Host]) -> Host:
    return hosts[0]


async def test_a_name_that_changes_in_case_only_keeps_its_file(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    area = one.area()
    await area.restore()
    one.write("Readme", "text")
    one.write("Data/x", "x")
    one.write("e\u0301", "in another form")  # NFD
    await area.push()
    await two.area().restore()
    (one.directory() / "Readme").rename(one.directory() / "README")
    (one.directory() / "Data").rename(one.directory() / "data")
    (one.directory() / "e\u0301").rename(one.directory() / "\u00e9")
    assert (await area.push()).left_out == {}
    await two.area().restore()
    assert two.files() == one.files() == {"README": "text", "data/x": "x", "\u00e9": "in another form"}


async def test_a_plugin_may_change_the_case_of_a_name_and_its_file(
    database: Database, tmp_path: Path
) -> None:
    files = HostFiles(
        database, DirectoryStore(tmp_path / "objects"), root=tmp_path / "h", cache_bytes=1 << 30
    )
    place = AreaPlace(name="plugin/a", directory=tmp_path / "plugin", forgets=False, refuses=True)
    async with files.use(place) as use:
        (place.directory / "A").write_text("1")
        await use.push()
        (place.directory / "A").rename(place.directory / "a")
        (place.directory / "a").write_text("2")
        assert (await use.push()).area is not None


async def test_a_file_that_is_named_like_an_unfinished_one_is_kept(host: Host) -> None:
    name = f".{'0a' * 8}.part"
    area = host.area()
    await area.restore()
    host.write("source", "sent by a client")
    with (host.directory() / "source").open("rb") as file:
        content = host.cache.add(file)
    row = (await host.contents.put([content]))[content.sha256]
    async with host.database.begin() as tx:
        await tx.files.commit(AREA, put=[Entry(path=name, content_id=row.id, bytes=content.bytes)])
    again = host.area()
    await again.restore()
    host.write("other", "1")
    await again.push()
    await host.area().restore()
    assert host.files() == {name: "sent by a client", "other": "1"}


async def test_a_file_that_becomes_a_link_or_gets_a_second_name_keeps_its_version(
    hosts: tuple[Host, Host],
) -> None:
    one, two = hosts
    area = one.area()
    await area.restore()
    for name in ("linked", "replaced", "d/x", "deleted"):
        one.write(name, name)
    await area.push()
    root = one.directory()
    os.link(root / "linked", root / "second")
    (root / "replaced").unlink()
    (root / "replaced").symlink_to("linked")
    (root / "d/x").unlink()
    (root / "d").rmdir()
    (root / "d").symlink_to("/etc")
    (root / "deleted").unlink()
    assert set((await area.push()).left_out) == {"'linked'", "'second'", "'replaced'", "'d'"}
    await two.area().restore()
    assert two.files() == {"linked": "linked", "replaced": "replaced"} and (two.directory() / "d").is_dir()
    await one.area().restore()
    assert one.files() == two.files()


class Meddling:
    """Changes a file while a push copies it."""

    def __init__(self, host: Host, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self._add = host.cache.add
        self._change = change
        monkeypatch.setattr(host.cache, "add", self)

    def __call__(self, source: BinaryIO, **options: Any) -> Any:
        added = self._add(source, **options)
        change, self._change = self._change, lambda: None
        change()
        return added


async def test_a_file_that_changes_while_it_is_committed_is_in_the_next_version(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = hosts
    area = one.area()
    await area.restore()
    file = one.write("x", "1")
    # Of the same size, in place, and as soon after the first write as a program can.
    Meddling(one, lambda: file.write_text("2"), monkeypatch)
    await area.push()
    await two.area().restore()
    assert two.files() == {"x": "1"}
    await area.push()
    await two.area().restore()
    assert two.files() == {"x": "2"}


async def test_a_file_that_grows_for_ever_does_not_keep_a_push(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = hosts
    area = one.area()
    await area.restore()
    file = one.write("log", "12345")
    settled = local_area.settled

    def grows(fd: int) -> os.stat_result:
        info = settled(fd)
        with file.open("a") as log:
            log.write("6789")
        return info

    monkeypatch.setattr(local_area, "settled", grows)
    await area.push()
    await two.area().restore()
    assert two.files() == {"log": "12345"}


async def test_a_file_that_grows_after_its_size_was_checked_is_copied_to_that_size(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = hosts
    area = one.area()
    await area.restore()
    file = one.write("sparse", "12345")
    scan_directory = local_area.scan_directory

    def then_grows(*args: Any) -> scan.Scan:
        found = scan_directory(*args)
        os.truncate(file, 1 << 40)
        return found

    with monkeypatch.context() as growing:
        growing.setattr(local_area, "scan_directory", then_grows)
        await area.push(limits=AreaLimits(bytes=1000))
    await two.area().restore()
    assert two.files() == {"sparse": "12345"}
    with pytest.raises(FilesQuotaError):  # the next one sees it
        await area.push(limits=AreaLimits(bytes=1000))


@pytest.mark.parametrize("limits", [AreaLimits(bytes=1 << 20), AreaLimits(names=50)])
async def test_a_change_beyond_the_quota_is_refused_before_anything_is_copied(
    limits: AreaLimits, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = host.area()
    await area.restore()
    for number in range(60):
        with host.write(f"f{number}", "").open("r+b") as file:
            file.truncate(1 << 40)  # takes no space on the disk
    monkeypatch.setattr(host.cache, "add", None)
    with pytest.raises(FilesQuotaError, match="shared/box"):
        await area.push(limits=limits)


async def test_a_directory_beyond_its_quota_may_shrink(host: Host) -> None:
    area = host.area()
    await area.restore()
    for number in range(4):
        host.write(f"f{number}", "12345")
    await area.push()
    (host.directory() / "f0").unlink()
    pushed = await area.push(limits=AreaLimits(bytes=10, names=2))
    assert pushed.area is not None and (pushed.area.names, pushed.area.bytes) == (3, 15)


async def test_more_names_than_can_be_seen_remove_no_file(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    area = host.area()
    await area.restore()
    for number in range(5):
        host.write(f"f{number}", "1")
    await area.push()
    monkeypatch.setattr(scan, "MOST_NAMES", 4)
    monkeypatch.setattr(local_area, "MOST_NAMES", 4)
    with pytest.raises(NekroError, match="more than 4 names"):
        await area.push()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/x",
        "..",
        "a/../../x",
        "a//x",
        "./x",
        "x/",
        "",
        "n" * 256,
        "/".join("d" * 33),
        "x\udcff",
        "kept/x",
    ],
)
async def test_a_path_that_no_commit_makes_is_an_error_and_writes_nothing(path: str, host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("kept", "1")
    host.write("bad", "1")
    await area.push()
    async with host.database.begin() as tx:
        shown = path.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        await tx.connection.exec_driver_sql("UPDATE file_entries SET path = ? WHERE path = 'bad'", (shown,))
    before = {one for one in host.root.parent.rglob("*") if "objects" not in one.parts}
    if "\udcff" in path:
        await host.area().restore()  # what the database returns then is a name
        return
    with pytest.raises(NekroError) as refused:
        await host.area().restore()
    named = ("'kept'", ascii(path)[:40])  # a file that is to hold another one, or the path
    assert any(name in str(refused.value) for name in named)
    after = {one for one in host.root.parent.rglob("*") if "objects" not in one.parts}
    assert {one for one in after - before if host.directory() not in one.parents} == set()


@pytest.mark.parametrize("kind", ["empty", "truncated", "swapped", "longer", "huge"])
async def test_an_altered_object_is_never_served(
    kind: str, store: ObjectStore, database: Database, tmp_path: Path
) -> None:
    one, two = (Host(tmp_path / name, database, store) for name in ("one", "two"))
    area = one.area()
    await area.restore()
    one.write("d/a.txt", "what was stored")
    one.write("b.txt", "another content")
    await area.push()
    async with database.read() as tx:
        contents = {content.bytes: content for content in await tx.contents.needed(after=0)}
        (found,) = (
            entry
            for entry in await tx.files.entries(await tx.files.find(AREA))  # type: ignore[arg-type]
            if entry.path == "d/a.txt"
        )
        keys = {one.sha256: one.key for one in await tx.contents.needed(after=0)}
    assert len(contents) == 1  # both are of the same size
    key = keys[found.sha256]
    right = await store.get(key)
    assert right is not None
    (other,) = (one for sha256, one in keys.items() if sha256 != found.sha256)
    data = {
        "empty": b"",
        "truncated": right[:-1],
        "swapped": await store.get(other),
        "longer": right + b"!",
        "huge": right + bytes(PART_BYTES),
    }[kind]
    assert data is not None
    await store.delete([key])
    await store.put(key, data)
    read = await store.get(key)
    assert read is not None and len(read) <= PART_BYTES + 1
    with pytest.raises(DamagedFileError, match=r"shared/box/d/a\.txt"):
        await two.area().restore()
    assert two.files().get("d/a.txt") is None
    assert two.cache.find(found.sha256, found.bytes) is None
    # The host that wrote it has it in its cache, and serves that.
    (one.directory() / "d/a.txt").unlink()
    await one.area().restore()
    assert one.files()["d/a.txt"] == "what was stored"


async def test_a_file_of_the_cache_that_lost_its_end_is_fetched_again(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "what was stored")
    await area.push()
    (cached,) = (path for path in (host.root / "files-cache").rglob("*") if path.is_file())
    os.truncate(cached, 4)  # as a loss of power leaves it
    (host.directory() / "a").unlink()
    await host.area().restore()
    assert host.files() == {"a": "what was stored"}


async def test_a_program_that_keeps_a_file_open_changes_no_later_version(host: Host) -> None:
    area = host.area()
    await area.restore()
    host.write("a", "first")
    await area.push()
    with (host.directory() / "a").open("r+") as kept:
        other = Host(host.root.parent / "two", host.database, DirectoryStore(host.root.parent / "objects"))
        theirs = other.area()
        await theirs.restore()
        other.write("a", "second")
        await theirs.push()
        await host.area().restore()
        kept.write("HACKED")
    assert host.files() == {"a": "second"}
    (host.directory() / "a").unlink()
    await host.area().restore()
    assert host.files() == {"a": "second"}


async def test_links_that_appear_between_a_scan_and_its_copies_are_not_followed(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    area = host.area()
    await area.restore()
    for name in ("a", "b", "c", "d/e"):
        host.write(name, "1")

    def replace() -> None:
        root = host.directory()
        for name in ("b", "c"):
            (root / name).unlink()
        (root / "b").symlink_to(secret)
        os.mkfifo(root / "c")
        (root / "d/e").unlink()
        (root / "d").rmdir()
        (root / "d").symlink_to(tmp_path)

    Meddling(host, replace, monkeypatch)
    pushed = await asyncio.wait_for(area.push(), 30)
    assert set(pushed.left_out) == {"'b'", "'c'", "'d/e'"}
    async with host.database.read() as tx:
        stored = await tx.contents.needed(after=0)
    assert [content.bytes for content in stored] == [1]
