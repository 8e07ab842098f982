"""The manifest on SQLite and PostgreSQL: versions, fencing, limits, and what a commit refuses."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import (
    ConflictError,
    FencedError,
    FilesQuotaError,
    InvalidValueError,
    NotFoundError,
)
from storage.driver.connection import Connection
from storage.engine import Database
from storage.files.given import MOST_ROWS
from storage.files.manifest import Area, AreaLimits, Entry, Writer

AREA = "shared/box"


@pytest.fixture(params=["sqlite", "postgres"])
async def database(
    request: pytest.FixtureRequest, migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    """A fresh, migrated database of each kind."""
    database = Database(migrated_copy(request.param), tmp_path)
    yield database
    await database.dispose()


async def stored(database: Database, *texts: str) -> dict[str, int]:
    """Ids of contents that the store has, by their text."""
    digests = {hashlib.sha256(text.encode()).hexdigest(): text for text in texts}
    async with database.begin() as tx:
        found = await tx.contents.announce({sha256: len(text) for sha256, text in digests.items()})
        await tx.contents.mark_stored(dict.fromkeys(content.id for content in found.values()))
    return {digests[content.sha256]: content.id for content in found.values()}


async def files_of(database: Database, **texts: str) -> list[Entry]:
    """Entries of files by path, with `__` for the separator."""
    ids = await stored(database, *texts.values())
    return [
        Entry(path=path.replace("__", "/"), content_id=ids[text], bytes=len(text), modified_ns=1)
        for path, text in texts.items()
    ]


async def commit(
    database: Database, put: Sequence[Entry] = (), removed: Sequence[str] = (), **how: object
) -> Area:
    async with database.begin() as tx:
        return await tx.files.commit(AREA, put=put, removed=removed, **how)  # type: ignore[arg-type]


async def listed(database: Database, *, version: int | None = None) -> dict[str, int]:
    async with database.read() as tx:
        area = await tx.files.find(AREA)
        assert area is not None
        entries = await tx.files.entries(area, version=version)
    return {entry.path: entry.bytes for entry in entries}


async def test_a_change_makes_the_next_version_and_older_ones_remain(database: Database) -> None:
    first = await commit(database, await files_of(database, a="one", d__b="three"))
    assert (first.version, first.names, first.bytes) == (1, 3, 8)
    second = await commit(database, await files_of(database, a="other"), ["d/b", "absent"])
    assert (second.version, second.names, second.bytes) == (2, 2, 5)
    assert await listed(database) == {"a": 5, "d": 0}
    assert await listed(database, version=1) == {"a": 3, "d": 0, "d/b": 5}


async def test_an_entry_has_its_content_mode_and_time(database: Database) -> None:
    ids = await stored(database, "text")
    entry = Entry(path="日本/x", content_id=ids["text"], bytes=4, is_executable=True, modified_ns=1 << 60)
    area = await commit(database, [entry])
    async with database.read() as tx:
        assert await tx.files.find("shared/none") is None
        found = {one.path: one for one in await tx.files.entries(area)}
        users = await tx.files.users_of(ids.values())
    digest = hashlib.sha256(b"text").hexdigest()
    assert found["日本/x"] == Entry(**{**vars(entry), "sha256": digest})
    assert found["日本"] == Entry(path="日本")
    assert users == [(digest, AREA, "日本/x")]


async def test_what_is_equal_is_not_written_again(database: Database) -> None:
    files = await files_of(database, a="one", d__b="three")
    await commit(database, files)
    await commit(database, [*files, Entry(path="d")])
    async with database.read() as tx:
        rows = (await tx.connection.exec_driver_sql("SELECT since, until FROM file_entries")).all()
    assert [tuple(row) for row in rows] == [(1, None)] * 3


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "n" * 256])
async def test_a_path_that_leaves_the_area_is_refused(database: Database, path: str) -> None:
    (entry,) = await files_of(database, a="one")
    with pytest.raises(InvalidValueError, match="cannot be a file of an area"):
        await commit(database, [Entry(**{**vars(entry), "path": path})])
    with pytest.raises(InvalidValueError, match="cannot be a file of an area"):
        await commit(database, removed=[path])


async def test_paths_that_differ_only_in_case_are_refused_with_both_names(database: Database) -> None:
    with pytest.raises(InvalidValueError, match="'b' and 'B'"):
        await commit(database, await files_of(database, B="one", b="two"))
    await commit(database, await files_of(database, Dir__x="one"))
    for file in ("dir/y", "dir", "DIR/x"):
        (entry,) = await files_of(database, a="two")
        with pytest.raises(InvalidValueError, match="differ only in case"):
            await commit(database, [Entry(**{**vars(entry), "path": file})])
    assert await listed(database) == {"Dir": 0, "Dir/x": 3}


async def test_a_file_can_be_renamed_to_another_case(database: Database) -> None:
    await commit(database, await files_of(database, readme="one"))
    await commit(database, await files_of(database, README="one"), ["readme"])
    assert await listed(database) == {"README": 3}


async def test_a_file_holds_no_others_and_a_directory_goes_with_what_it_holds(database: Database) -> None:
    await commit(database, await files_of(database, f="one", d__x="two"))
    with pytest.raises(InvalidValueError, match="'f' is a file"):
        await commit(database, await files_of(database, f__x="two"))
    with pytest.raises(InvalidValueError, match="'g' is a file"):
        await commit(database, await files_of(database, g="one", g__x="two"))
    for put in ({}, {"d": "three"}):
        with pytest.raises(InvalidValueError, match="'d/x' is left without its directory"):
            await commit(database, await files_of(database, **put), ["d"])
    await commit(database, await files_of(database, d="three"), ["d/x"])
    await commit(database, await files_of(database, f__x="two"), ["f"])
    assert await listed(database) == {"d": 5, "f": 0, "f/x": 3}


async def test_limits_refuse_growth_and_accept_less(database: Database) -> None:
    await commit(database, await files_of(database, a="12345", b="12345"))
    with pytest.raises(FilesQuotaError, match="11 bytes"):
        await commit(database, await files_of(database, c="1"), limits=AreaLimits(bytes=10))
    with pytest.raises(FilesQuotaError, match="3 files"):
        await commit(database, await files_of(database, c="1"), limits=AreaLimits(names=2))
    await commit(database, await files_of(database, c="1"), ["a"], limits=AreaLimits(bytes=6, names=2))
    await commit(database, removed=["c"], limits=AreaLimits(bytes=1, names=1))
    assert await listed(database) == {"b": 5}


async def test_a_holder_that_lost_the_chat_changes_nothing(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
    async with database.begin() as tx:
        fence = await tx.chats.acquire("chat", owner="one", lease_seconds=60)
    assert fence is not None
    files = await files_of(database, a="one")
    await commit(database, files, writer=Writer(chat_key="chat", fence=fence))
    async with database.begin() as tx:
        await tx.chats.release("chat", fence=fence)
        assert await tx.chats.acquire("chat", owner="two", lease_seconds=60) == fence + 1
    with pytest.raises(FencedError):
        await commit(database, removed=["a"], writer=Writer(chat_key="chat", fence=fence))
    assert await listed(database) == {"a": 3}


async def test_a_change_of_what_another_has_changed_is_a_conflict_if_it_asks(database: Database) -> None:
    seen = await files_of(database, a="one", b="one", c="one")
    await commit(database, seen)
    expected: dict[str, Entry | None] = {entry.path: entry for entry in seen}
    await commit(database, await files_of(database, a="two"))
    await commit(database, removed=["c"])
    with pytest.raises(ConflictError, match="'a' was changed elsewhere in version 2 and removed here"):
        await commit(database, removed=["a"], expected=expected)
    with pytest.raises(ConflictError, match="'a' was changed elsewhere in version 2 and changed here"):
        await commit(database, await files_of(database, a="three"), expected={})
    with pytest.raises(ConflictError, match="'c' was removed elsewhere and changed here"):
        await commit(database, await files_of(database, c="two"), expected=expected)
    await commit(database, await files_of(database, a="two"), expected={})
    await commit(database, removed=["b", "c"], expected=expected)
    assert await listed(database) == {"a": 3}


async def test_a_content_that_is_not_stored_is_refused(database: Database) -> None:
    async with database.begin() as tx:
        found = await tx.contents.announce({"0" * 64: 3})
    (content,) = found.values()
    with pytest.raises(NotFoundError):
        await commit(database, [Entry(path="a", content_id=content.id, bytes=3)])
    async with database.read() as tx:
        assert await tx.files.find(AREA) is None


async def test_changes_of_an_area_follow_each_other(database: Database) -> None:
    changes = [await files_of(database, **{f"f{number}": "one"}) for number in range(8)]
    areas = await asyncio.gather(*(commit(database, change) for change in changes))
    assert sorted(area.version for area in areas) == list(range(1, 9))
    assert len(await listed(database)) == 8


async def test_the_statements_of_a_change_are_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = await files_of(database, **{f"d__f{number}": f"{number}" for number in range(MOST_ROWS - 1)})
    count = 0
    execute = Connection.execute

    async def counted(self: Connection, *given: object) -> object:
        nonlocal count
        count += 1
        return await execute(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "execute", counted)
    await commit(database, files)
    assert count <= 6
    assert len(await listed(database)) == MOST_ROWS


async def test_retention_forgets_old_versions_and_keeps_the_newest(database: Database) -> None:
    from broker_config.settings import RetentionSettings
    from storage.retention import delete_expired

    await commit(database, await files_of(database, a="one", b="one"))
    await commit(database, await files_of(database, a="two"))
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql(
            "UPDATE file_entries SET ended_at = '2000-01-01 00:00:00.000000' WHERE until IS NOT NULL"
        )
    assert (await delete_expired(database, RetentionSettings()))["file_entries"] == 1
    assert await listed(database) == {"a": 3, "b": 3}


async def test_announced_contents_keep_their_ids(database: Database) -> None:
    sizes = {f"{number:064}": number for number in range(3)}
    async with database.begin() as tx:
        first = await tx.contents.announce(sizes)
        await tx.contents.mark_stored({first[f"{1:064}"].id: None})
    async with database.begin() as tx:
        second = await tx.contents.announce(sizes)
    assert {key: content.id for key, content in first.items()} == {
        key: content.id for key, content in second.items()
    }
    assert [content.is_stored for content in second.values()].count(True) == 1


async def test_unused_contents_are_deleted_after_the_grace_time_and_ids_are_not_used_again(
    database: Database,
) -> None:
    await commit(database, await files_of(database, a="kept"))
    unused = await stored(database, "unused")
    async with database.begin() as tx:
        assert await tx.contents.delete_unused(grace_seconds=3600) == []
    async with database.begin() as tx:
        deleted = await tx.contents.delete_unused(grace_seconds=-1)
    assert [content.id for content in deleted] == list(unused.values())
    again = await stored(database, "unused")
    assert again["unused"] > unused["unused"]
    async with database.begin() as tx:
        assert await tx.contents.known([*again.values(), *unused.values()]) == {
            again["unused"]: hashlib.sha256(b"unused").hexdigest()
        }
        assert await tx.contents.highest_id() == again["unused"]


async def test_parts_keep_their_contents(database: Database) -> None:
    ids = await stored(database, "whole", "part 1", "part 2")
    for divided in (["part 1"] * 4, ["part 2", "part 1", "part 2"]):  # the second after it was lost
        async with database.begin() as tx:
            await tx.contents.mark_lost([ids["whole"]])
            await tx.contents.add_parts(ids["whole"], [ids[name] for name in divided])
            await tx.contents.add_parts(ids["whole"], [ids["part 1"]])  # of a writer that comes later
            parts = [part.id for part in await tx.contents.parts(ids["whole"])]
        assert parts == [ids[name] for name in divided]
    async with database.begin() as tx:
        deleted = await tx.contents.delete_unused(grace_seconds=-1)
    assert {content.id for content in deleted} == {ids["whole"]}
    async with database.begin() as tx:
        assert len(await tx.contents.delete_unused(grace_seconds=-1)) == 2
