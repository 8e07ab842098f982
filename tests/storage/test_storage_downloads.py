"""Downloads as rows: one fenced claim per target, visible to other workers."""

from __future__ import annotations

import pytest

from nekro_agent.errors import FencedError
from storage.engine import Database
from storage.repositories.leases import DOWNLOAD_CLAIMS

CLAIM = {"request": "r", "owner": "w"}


async def claim(database: Database, *, lease_seconds: float = 30) -> int | None:
    async with database.begin() as tx:
        granted = await tx.downloads.claim("a/b", lease_seconds=lease_seconds, **CLAIM)
    return granted and granted[0]


async def test_one_download_per_target_until_it_ends(database: Database) -> None:
    assert await claim(database) == 1
    assert await claim(database) is None
    async with database.begin() as tx:
        await tx.downloads.progress("a/b", fence=1, done_bytes=7, whole_bytes=9)
        found = await tx.downloads.find("a/b")
        assert found is not None and (found.done_bytes, found.whole_bytes, found.report) == (7, 9, None)
        await tx.downloads.end("a/b", fence=1, report={"size_bytes": 9})
    async with database.begin() as tx:
        granted = await tx.downloads.claim("a/b", lease_seconds=30, **CLAIM)
    assert granted is not None
    fence, previous = granted
    assert fence == 2 and previous is not None and previous.report == {"size_bytes": 9}
    async with database.read() as tx:
        running = await tx.downloads.find("a/b")
    assert running is not None and running.report is None


async def test_an_expired_claim_is_taken_over_and_its_writes_are_refused(database: Database) -> None:
    assert await claim(database, lease_seconds=-1) == 1
    assert await claim(database) == 2
    async with database.autocommit() as tx:
        with pytest.raises(FencedError):
            await tx.downloads.progress("a/b", fence=1, done_bytes=1, whole_bytes=None)
        with pytest.raises(FencedError):
            await tx.downloads.end("a/b", fence=1, report=None)
    async with database.autocommit() as tx:
        renewal = await tx.leases.renew(DOWNLOAD_CLAIMS, [("a/b", 1), ("a/b", 2)], lease_seconds=30)
    assert (renewal.kept, renewal.lost) == ({("a/b", 2)}, {("a/b", 1)})


async def test_a_download_without_a_worker_can_be_deleted(database: Database) -> None:
    await claim(database)
    async with database.begin() as tx:
        assert await tx.downloads.idle(idle_seconds=-5, limit=9) == []
        await tx.downloads.end("a/b", fence=1, report=None)
        (idle,) = await tx.downloads.idle(idle_seconds=-5, limit=9)
        assert await tx.downloads.idle(idle_seconds=60, limit=9) == []
    await claim(database)
    async with database.begin() as tx:
        assert not await tx.downloads.forget(idle), "another owner claimed it meanwhile"
        await tx.downloads.end("a/b", fence=2, report=None)
        (idle,) = await tx.downloads.idle(idle_seconds=-5, limit=9)
        assert await tx.downloads.forget(idle)
        assert await tx.downloads.find("a/b") is None
