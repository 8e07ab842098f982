"""The catalogue's rows, and the texts of SQL that callers read with."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from nekro.app.catalogue import CatalogueReader, FleetCatalogue
from nekro.operations.work import TimerChange, change_stored_timer, timers_after
from nekro.plugins.entries import PluginEntry, PluginStatus, digest_of
from nekro_agent.errors import ConflictError
from nekro_agent.methods import Lane
from nekro_agent.ports import CallbackTimer
from storage.caller_reads import (
    LaneOverride,
    Snapshot,
    find_chat,
    lane_overrides,
    read_snapshots,
    read_workers,
)
from storage.catalogue import NewWorker
from storage.engine import Database
from storage.repositories.timers import WorkerTimer


def worker(name: str) -> NewWorker:
    return NewWorker(id=name, name=name, lane="methods", host="h", pid=1)


def snapshot(key: str, **fields: object) -> Snapshot:
    text = PluginEntry(key=key, **fields).to_json()  # type: ignore[arg-type]
    return Snapshot(digest=digest_of(text), plugin_key=key, entry=text)


async def publish(database: Database, name: str, *snapshots: Snapshot, seconds: float = 60) -> None:
    async with database.begin() as tx:
        await tx.catalogue.enter(worker(name), lease_seconds=seconds)
        await tx.catalogue.serve(name, snapshots)
        await tx.catalogue.forget_gone()


async def read(database: Database) -> FleetCatalogue:
    return await CatalogueReader(database).read()


async def test_plugins_are_listed_in_loading_order_with_the_newest_version_of_each(
    database: Database,
) -> None:
    await publish(database, "old", snapshot("a", version="1"), snapshot("b"), snapshot("gone"))
    await publish(database, "new", snapshot("c"), snapshot("a", version="2"))
    catalogue = await read(database)
    assert [(plugin.key, plugin.version) for plugin in catalogue.plugins] == [
        ("c", ""), ("a", "2"), ("b", ""), ("gone", ""),
    ]  # fmt: skip
    assert [version.workers for version in catalogue.versions["a"]] == [("new",), ("old",)]
    assert [one.name for one in catalogue.workers] == ["old", "new"]


async def test_a_version_that_failed_to_load_is_not_preferred(database: Database) -> None:
    await publish(database, "one", snapshot("a", digest="x"))
    await publish(database, "two", snapshot("a", digest="x", status=PluginStatus.FAILED, error="no module"))
    catalogue = await read(database)
    assert catalogue.plugins[0].status is PluginStatus.OK
    assert catalogue.differences() == ["1 of 2 workers failed to load a: no module (two)"]


async def test_what_no_worker_serves_is_deleted_when_another_worker_publishes(database: Database) -> None:
    await publish(database, "one", snapshot("a"))
    async with database.autocommit() as tx:
        await tx.catalogue.leave("one")
    left = await read(database)
    assert not left.is_live and [plugin.key for plugin in left.plugins] == ["a"], "the last catalogue stays"
    await publish(database, "two", snapshot("b"))
    assert [plugin.key for plugin in (await read(database)).plugins] == ["b"]
    async with database.read() as tx:
        assert [one.id for one in await read_workers(tx.connection)] == ["two"]
        assert await read_snapshots(tx.connection, [snapshot("a").digest]) == []


async def test_a_worker_that_publishes_again_replaces_what_it_served(database: Database) -> None:
    await publish(database, "one", snapshot("a"), snapshot("b"))
    reader = CatalogueReader(database)
    first = await reader.read()
    assert await reader.read() is first, "nothing has changed"
    await publish(database, "one", snapshot("a", version="2"))
    assert [(plugin.key, plugin.version) for plugin in (await reader.read()).plugins] == [("a", "2")]


async def test_an_entry_that_this_release_cannot_read_does_not_hide_the_others(database: Database) -> None:
    strange = Snapshot(digest="d", plugin_key="b", entry='{"key": "b", "status": "frozen"}')
    await publish(database, "one", snapshot("a"), strange)
    assert [plugin.key for plugin in (await read(database)).plugins] == ["a"]


async def test_many_plugins_are_published_at_once(database: Database) -> None:
    await publish(database, "one", *(snapshot(f"p{number:03}") for number in range(300)))
    assert len((await read(database)).plugins) == 300


async def test_callers_read_chats_and_lane_overrides_as_they_were_written(database: Database) -> None:
    key = "群\0 \ud800 1"
    async with database.begin() as tx:
        made = await tx.chats.ensure(key, adapter_key="a", channel_name="näme\0")
        await tx.lane_overrides.set_by_operator("Ada.todo.add\0", lane=Lane.LONG, reason="slow\0")
    async with database.read() as tx:
        assert await find_chat(tx.connection, key) == made == await tx.chats.find(key)
        assert await find_chat(tx.connection, "other") is None
        overrides = await lane_overrides(tx.connection)
    assert overrides == {"Ada.todo.add\0": LaneOverride(lane="long", reason="slow\0", source="operator")}


def callback_timer(timer_id: str, *, chat_key: str = "no_chat") -> CallbackTimer:
    return CallbackTimer(
        id=timer_id,
        chat_key=chat_key,
        fire_at=datetime(2100, 1, 1, tzinfo=UTC),
        description=f"d{timer_id}",
        temporary=False,
        plugin_key="Ada.a",
    )


async def listed(database: Database, chat_key: str | None = None) -> list[tuple[str, str]]:
    async with database.read() as tx:
        timers = await timers_after(tx, chat_key, limit=9)
    return [(timer.id, timer.worker) for timer in timers if isinstance(timer, WorkerTimer)]


async def test_timers_with_callbacks_are_listed_while_their_worker_lives(database: Database) -> None:
    await publish(database, "one", snapshot("a"))
    await publish(database, "two", snapshot("a"))
    other = callback_timer("t2", chat_key="other")
    async with database.begin() as tx:
        await tx.catalogue.serve_timers("one", [callback_timer("t1"), other])
        await tx.catalogue.serve_timers("two", [callback_timer("t3")])
    assert await listed(database) == [("t1", "one"), ("t2", "one"), ("t3", "two")]
    assert await listed(database, "other") == [("t2", "one")]
    async with database.begin() as tx:
        await tx.catalogue.serve_timers("one", [other])
        before = await tx.change_listing.timers()
        assert before.keys() == {"other", "no_chat"}
        (timer,) = await timers_after(tx, "other", limit=9)
        with pytest.raises(ConflictError, match=r"plugin Ada\.a in the memory of worker one"):
            await change_stored_timer(tx, timer, TimerChange.DELETE)
    async with database.autocommit() as tx:
        await tx.catalogue.leave("one")
    assert await listed(database) == [("t3", "two")]
    async with database.begin() as tx:
        assert await tx.catalogue.forget_timers() == [other]
        assert await tx.catalogue.forget_timers() == []
        assert (await tx.change_listing.timers()).keys() == {"no_chat"}
    assert await listed(database) == [("t3", "two")]
