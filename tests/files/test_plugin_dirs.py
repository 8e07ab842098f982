"""Directories of plugins by their policy, on hosts with disks of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from plugin_workers import Worker, two_workers
from waiting import eventually

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import ConflictError
from storage.files.stores.store import ObjectStore


@pytest.fixture
async def workers(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path, store: ObjectStore
) -> AsyncIterator[tuple[Worker, Worker]]:
    async with two_workers(tmp_path, migrated_copy("sqlite"), store) as workers:
        yield workers


async def test_methods_on_two_hosts_see_each_others_files_in_turns(workers: tuple[Worker, Worker]) -> None:
    for number in range(4):
        async with workers[number % 2].call("a.synced") as path:
            counter = path / "count"
            assert (int(counter.read_text()) if counter.exists() else 0) == number
            counter.write_text(str(number + 1))


async def test_a_call_that_changes_what_another_host_has_changed_fails(
    workers: tuple[Worker, Worker],
) -> None:
    one, two = workers
    with pytest.raises(ConflictError, match=r"plugin/a\.synced: 'x' was changed elsewhere in version 1"):
        async with one.call("a.synced") as mine:
            (mine / "x").write_text("mine")
            async with two.call("a.synced") as theirs:
                (theirs / "x").write_text("theirs")
    async with one.call("a.synced") as path:
        assert (path / "x").read_text() == "theirs"


async def test_what_a_task_writes_that_a_call_left_running_is_on_other_hosts(
    workers: tuple[Worker, Worker],
) -> None:
    one, two = workers
    has_ended = asyncio.Event()

    async def write_later() -> None:
        await has_ended.wait()
        (one.areas.plugin_dir("a.synced") / "later").write_text("1")

    async with one.call("a.synced"):
        task = asyncio.create_task(write_later())
    has_ended.set()
    await task

    async def is_there() -> bool:
        async with two.call("a.synced") as path:
            return (path / "later").exists()

    await eventually(is_there, what="the file")


@pytest.mark.parametrize("key", ["a.local", "a.unused"])
async def test_other_directories_stay_on_their_hosts(workers: tuple[Worker, Worker], key: str) -> None:
    one, two = workers
    async with one.call(key) as path:
        (path / "x").write_text("1")
    async with two.call(key) as path:
        assert list(path.iterdir()) == []
    async with one.call(key) as path:
        assert (path / "x").read_text() == "1"


async def test_an_owner_has_what_the_one_before_has_stored(workers: tuple[Worker, Worker]) -> None:
    one, two = workers
    lease = await one.own()
    (one.areas.plugin_dir("a.pinned") / "db").write_text("1")
    await one.pinned.leave("a.pinned")
    await lease.release()
    lease = await two.own()
    assert (two.areas.plugin_dir("a.pinned") / "db").read_text() == "1"
    await two.pinned.leave("a.pinned")
    await lease.release()


async def test_an_old_owner_stores_nothing(workers: tuple[Worker, Worker]) -> None:
    one, two = workers
    old = await one.own()
    async with two.database.autocommit() as tx:
        await tx.leases.release(old.key, fence=old.fence)
    new = await two.own()
    (one.areas.plugin_dir("a.pinned") / "db").write_text("old")
    await one.pinned.leave("a.pinned")
    (two.areas.plugin_dir("a.pinned") / "db").write_text("new")
    await two.pinned.leave("a.pinned")
    await new.release()
    await one.own()
    assert (one.areas.plugin_dir("a.pinned") / "db").read_text() == "new"
    await one.pinned.leave("a.pinned")
