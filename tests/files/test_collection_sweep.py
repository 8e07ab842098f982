"""The sweep collects what no file has, and metrics say what the store of files has and does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hosts import Host, opened
from waiting import eventually

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro.base import metrics as metrics_module
from nekro.base.metrics import Metrics
from nekro_agent.errors import DamagedFileError
from storage.engine import Database
from storage.files.stores.directory import DirectoryStore
from storage.files.stores.store import ObjectStore
from workers.ops.sweeps import CollectionSweep


@pytest.fixture
async def database(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[Database]:
    async with opened(migrated_copy("sqlite"), tmp_path) as database:
        yield database


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float | None]:
    """Return the value of a sample of this process."""
    figures = Metrics()
    monkeypatch.setattr(metrics_module, "_figures", figures)
    return lambda name, **labels: figures.registry.get_sample_value(name, labels)


async def age(database: Database) -> None:
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql("UPDATE file_contents SET used_at = '2000-01-01 00:00:00.000000'")
        await tx.connection.exec_driver_sql("DELETE FROM file_entries WHERE until IS NOT NULL")


async def keys_of(store: ObjectStore) -> set[str]:
    """The keys of all objects besides those that name installations."""
    keys = {found.key async for batch in store.list() for found in batch}
    return {key for key in keys if not key.startswith("installation.")}


async def test_the_sweep_deletes_contents_that_no_file_has(
    database: Database, tmp_path: Path, counted: Callable[..., float | None]
) -> None:
    store = DirectoryStore(tmp_path / "objects")
    host = Host(tmp_path / "host", database, store)
    area = host.area()
    await area.restore()
    host.write("a.txt", "old")
    await area.push()
    host.write("a.txt", "newer")
    await area.push()
    await age(database)
    background = BackgroundLoop(database)
    try:
        sweep = CollectionSweep(database, background, store)
        assert await sweep.sweep() is None  # it runs beside the other sweeps
        pause = await eventually(sweep.sweep, what="the collection to end")
    finally:
        background.close()
    assert pause is not None and pause > 3600
    assert len(await keys_of(store)) == 1
    assert counted("nekro_files_collected_total", kind="contents") == 1
    assert counted("nekro_files_collected_total", kind="bytes") == 3
    async with database.read() as tx:
        totals = await tx.contents.totals()
    assert (totals.areas, totals.names, totals.bytes, totals.contents, totals.stored_bytes) == (1, 1, 5, 1, 5)


async def test_transfers_and_damage_are_counted(
    database: Database, tmp_path: Path, counted: Callable[..., float | None]
) -> None:
    store = DirectoryStore(tmp_path / "objects")
    first, second = (Host(tmp_path / name, database, store) for name in ("first", "second"))
    area = first.area()
    await area.restore()
    first.write("a.txt", "12345")
    await area.push()
    await second.area().restore()
    assert counted("nekro_files_stored_bytes_total") == counted("nekro_files_fetched_bytes_total") == 5
    assert counted("nekro_files_cache_reads_total", result="miss") == 1
    (key,) = await keys_of(store)
    (tmp_path / "objects" / key[:2] / key).write_bytes(b"54321")
    with pytest.raises(DamagedFileError):
        await Host(tmp_path / "third", database, store).area().restore()
    assert counted("nekro_files_damaged_total") == 1
