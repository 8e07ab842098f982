"""Hosts that are killed at each step of a commit, an upload and a collection: nothing lost, nothing half."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from faulty_store import Faults, FaultyStore
from hosts import AREA, Host, opened
from s3_process import BUCKET

from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.files.cache import CachedContent
from storage.files.collection import check, collect
from storage.files.content_rows import Content
from storage.files.manifest import Entry
from storage.files.stores.bucket import BucketStore
from storage.files.stores.opening import open_store
from storage.files.stores.store import PART_BYTES, ObjectStore

NOW = timedelta(seconds=-1)
LARGE = os.urandom(1 << 20) * 17


@pytest.fixture
def settings(migrated_copy: Callable[[str], DatabaseSettings]) -> DatabaseSettings:
    return migrated_copy("sqlite")


@pytest.fixture
async def database(settings: DatabaseSettings, tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(settings, tmp_path) as database:
        yield database


def walk(
    scenario: str, settings: DatabaseSettings, store_url: str, root: Path, *, first: int, every: int
) -> None:
    """Kill hosts at some of the steps of a scenario."""
    script = Path(__file__).with_name("killed_walk.py")
    command: list[str | Path] = [
        sys.executable,
        str(script),
        scenario,
        str(settings.url),
        store_url,
        root,
        str(first),
        str(every),
    ]
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > first


async def keys_of(store: ObjectStore) -> set[str]:
    """The keys of all objects besides those that name installations."""
    keys = {found.key async for batch in store.list() for found in batch}
    return {key for key in keys if not key.startswith("installation.")}


async def require_sound(database: Database, store: ObjectStore) -> None:
    """Nothing that an area needs is missing, and a collection leaves exactly that."""
    await collect(database, store, grace=NOW)
    assert (await check(database, store, reads=True)).damages == []
    async with database.read() as tx:
        known = await tx.contents.needed(after=0)
    assert await keys_of(store) == {content.key for content in known if content.bytes <= PART_BYTES}


#: With about 20 to 170 steps each; see ``killed_walk.py``.
SCENARIOS = ("run", "call", "upload", "bring", "plugin", "collection", "download")


def test_a_host_that_is_killed_leaves_the_old_version_or_the_new_one(
    settings: DatabaseSettings, tmp_path: Path
) -> None:
    walk("run", settings, f"file://{tmp_path / 'objects'}", tmp_path, first=40, every=50)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kills_lose_nothing_and_leave_nothing_half(
    scenario: str, settings: DatabaseSettings, tmp_path: Path
) -> None:
    walk(scenario, settings, f"file://{tmp_path / 'objects'}", tmp_path, first=2, every=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kills_at_each_step_lose_nothing_and_leave_nothing_half(
    scenario: str,
    kind: str,
    store_url: str,
    migrated_copy: Callable[[str], DatabaseSettings],
    tmp_path: Path,
) -> None:
    is_plain = kind == "sqlite" and store_url.startswith("file:")
    walk(scenario, migrated_copy(kind), store_url, tmp_path, first=1, every=1 if is_plain else 5)


def added(host: Host, text: str) -> CachedContent:
    """A content in the host's cache."""
    path = host.root / "source"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    with path.open("rb") as file:
        return host.cache.add(file)


async def test_a_content_that_is_collected_during_its_upload_is_stored_under_another_key(
    store: ObjectStore, database: Database, tmp_path: Path
) -> None:
    host = Host(tmp_path / "host", database, store)
    content = added(host, "wanted again")
    first = (await host.contents.put([content]))[content.sha256]
    async with database.begin() as tx:
        (row,) = await tx.contents.delete_unused(grace_seconds=-1)
    # Between the deletion of the row and that of the object.
    second = (await host.contents.put([content]))[content.sha256]
    async with database.begin() as tx:
        entry = Entry(path="a", content_id=second.id, bytes=content.bytes)
        await tx.files.commit(AREA, put=[entry])
    await store.delete([row.key])
    assert first.key == row.key != second.key
    fresh = Host(tmp_path / "fresh", database, store)
    await fresh.area().restore()
    assert fresh.files() == {"a": "wanted again"}


async def test_collections_beside_hosts_that_work_lose_nothing(
    store: ObjectStore, database: Database, tmp_path: Path
) -> None:
    done = asyncio.Event()

    async def collect_for_ever() -> None:
        while not done.is_set():
            await collect(database, store, grace=timedelta(seconds=30))

    async def work(number: int) -> None:
        host = Host(tmp_path / f"host-{number}", database, store, cache_bytes=100)
        name = f"shared/{number}"
        area = host.area(name)
        for turn in range(5):
            await area.restore()
            host.write("same", f"{turn % 2}", name)
            host.write(f"f{turn}", f"{number} {turn}", name)
            await area.push()

    collector = asyncio.create_task(collect_for_ever())
    await asyncio.gather(*(work(number) for number in range(3)))
    done.set()
    await collector
    await require_sound(database, store)
    for number in range(3):
        fresh = Host(tmp_path / f"fresh-{number}", database, store)
        await fresh.area(f"shared/{number}").restore()
        assert len(fresh.files(f"shared/{number}")) == 6


async def test_a_stale_listing_delays_a_collection_only(
    faulty: FaultyStore, database: Database, tmp_path: Path
) -> None:
    store = BucketStore(f"s3://{BUCKET}/{tmp_path.name}")
    host = Host(tmp_path / "host", database, store)
    await host.contents.put([added(host, "first")])
    faulty.faults = Faults(lists_old=True)
    assert len(await keys_of(store)) == 1
    area = host.area()
    await area.restore()
    host.write("a", "kept")
    await area.push()
    collected = await collect(database, store, grace=NOW)
    assert (collected.contents, collected.orphans) == (1, 1)
    assert (await check(database, store, reads=True)).damages == []
    faulty.faults = Faults()
    await require_sound(database, store)


async def test_a_collection_leaves_objects_of_another_database(
    store: ObjectStore, database: Database, tmp_path: Path
) -> None:
    foreign = f"{'a' * 64}.999"
    await store.put(foreign, b"theirs")
    await store.put("notours", b"theirs")
    host = Host(tmp_path / "host", database, store)
    await host.contents.put([added(host, "unused")])
    collected = await collect(database, store, grace=NOW)
    assert (collected.contents, collected.foreign) == (1, 1)
    assert await keys_of(store) == {foreign, "notours"}


async def test_two_installations_with_one_store_collect_nothing(
    store: ObjectStore, database: Database, migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    async with opened(migrated_copy("sqlite"), tmp_path / "b") as other:
        for _ in range(2):
            assert not (await collect(database, store, grace=NOW)).is_refused
        hosts = [Host(tmp_path / "one", database, store), Host(tmp_path / "two", other, store)]
        for host in hosts:
            area = host.area()
            await area.restore()
            host.write("a.txt", str(host.root))
            await area.push()
        kept = await keys_of(store)
        for one in (other, database, other):
            assert (await collect(one, store, grace=NOW)).is_refused
        assert await keys_of(store) == kept and len(kept) == 2
        # An operator who has moved one of them elsewhere says so.
        await store.delete(["installation.0", "installation.1"])
        assert not (await collect(database, store, grace=NOW)).is_refused


def parts_of(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


async def joined(host: Host, data: bytes) -> Content:
    """Store a content as a download does: in smaller parts than a file."""
    parts = [await host.contents.put_bytes(part) for part in parts_of(data, PART_BYTES // 4)]
    return await host.contents.join(hashlib.sha256(data).hexdigest(), parts)


async def test_a_download_that_lost_a_part_is_whole_when_a_host_stores_the_file(
    database: Database, tmp_path: Path
) -> None:
    store = open_store(f"file://{tmp_path / 'objects'}")
    host, fresh = Host(tmp_path / "host", database, store), Host(tmp_path / "fresh", database, store)
    await joined(host, LARGE)
    first = next((tmp_path / "objects").glob(f"*/{hashlib.sha256(LARGE[: PART_BYTES // 4]).hexdigest()}.*"))
    first.write_bytes(b"altered")
    area = host.area()
    await area.restore()
    (host.directory() / "model").write_bytes(LARGE)
    await area.push()
    assert len((await check(database, store, repairs=True)).damages) == 1
    (host.directory() / "copy").write_bytes(LARGE)
    await area.push()
    assert (await check(database, store, reads=True)).damages == []
    await fresh.area().restore()
    assert (fresh.directory() / "model").read_bytes() == LARGE


async def test_writers_that_divide_a_content_differently_at_once_leave_it_whole(
    store: ObjectStore, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, fresh = (Host(tmp_path / name, database, store) for name in ("one", "two", "fresh"))
    announce = two.contents._announce
    for name, host in (("one", one), ("two", two)):
        host.root.mkdir()
        (host.root / name).write_bytes(LARGE)

    async def overtaken(sizes: dict[str, int]) -> dict[str, Content]:
        rows = await announce(sizes)
        if len(LARGE) in sizes.values():
            with (one.root / "one").open("rb") as file:
                await one.contents.put([one.cache.add(file)])
        return rows

    monkeypatch.setattr(two.contents, "_announce", overtaken)
    row = await joined(two, LARGE)
    found = await fresh.contents.fetch(row.id, row.sha256, row.bytes, name="model")
    assert found.path.read_bytes() == LARGE


@pytest.mark.parametrize("kind", ["missing", "short", "altered"])
async def test_a_check_names_the_files_of_a_damaged_object_and_lets_a_host_repair_it(
    kind: str, database: Database, tmp_path: Path
) -> None:
    objects = tmp_path / "objects"
    store = open_store(f"file://{objects}")
    host = Host(tmp_path / "host", database, store)
    area = host.area()
    await area.restore()
    host.write("d/a", "content")
    (host.directory() / "large").write_bytes(LARGE)
    await area.push()
    for path in [path for path in objects.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        match kind:
            case "missing":
                path.unlink()
            case "short":
                path.write_bytes(data[:-1])
            case "altered":
                path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    found = await check(database, store, reads=kind == "altered", repairs=True)
    assert sorted(damage.files for damage in found.damages) == [
        ("shared/box/d/a",), ("shared/box/large",), ("shared/box/large",)
    ]  # fmt: skip
    # A run that writes the same bytes stores them again.
    await area.restore()
    host.write("d/b", "content")
    (host.directory() / "copy").write_bytes(LARGE)
    await area.push()
    assert (await check(database, store, reads=True)).damages == []
    fresh = Host(tmp_path / "fresh", database, store)
    await fresh.area().restore()
    assert (fresh.directory() / "large").read_bytes() == LARGE
    assert (fresh.directory() / "d/a").read_text() == "content"
