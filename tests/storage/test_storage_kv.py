"""Promises of the SQL store alone: durability, processes, limits. The contract tests contain the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from forked_code import forked
from sqlalchemy import func, select
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings, StoreSettings
from nekro_agent.errors import InvalidValueError
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.tables import PLUGIN_VALUES

SCOPE: dict[str, str] = {"chat_key": "", "user_key": "", "store_key": "k"}

#: Sets one key and one own key many times; prints how often the shared one was new.
WRITER = """
import asyncio, sys
from pathlib import Path
from broker_config.settings import DatabaseSettings, StoreSettings
from storage.engine import Database
from storage.kv import SqlKeyValueStore

async def main(url, name):
    database = Database(DatabaseSettings(url=url), Path())
    store = SqlKeyValueStore(database, StoreSettings())
    async def one(number):
        shared = await store.set("a.b", chat_key="", user_key="", store_key=f"s{number % 10}", value=name)
        await store.set("a.b", chat_key=name, user_key="", store_key=str(number), value=name)
        return shared
    created = await asyncio.gather(*(one(number) for number in range(100)))
    await database.dispose()
    print(sum(created))

sys.stdin.readline()
asyncio.run(main(*sys.argv[1:]))
"""

#: Sets values without end and prints each key only after its `set` returned.
ENDLESS_WRITER = """
import asyncio, sys
from pathlib import Path
from broker_config.settings import DatabaseSettings, StoreSettings
from storage.engine import Database
from storage.kv import SqlKeyValueStore

async def main(url):
    store = SqlKeyValueStore(Database(DatabaseSettings(url=url), Path()), StoreSettings())
    number = 0
    while True:
        await store.set("a.b", chat_key="", user_key="", store_key=str(number), value="v")
        print(number, flush=True)
        number += 1

asyncio.run(main(sys.argv[1]))
"""


async def _count(database: Database) -> int:
    async with database.read() as tx:
        return (await tx.connection.execute(select(func.count()).select_from(PLUGIN_VALUES))).scalar_one()


async def test_concurrent_processes_that_set_one_key_report_one_creation(
    database: Database, migrated_settings: DatabaseSettings
) -> None:
    assert migrated_settings.url is not None
    processes = [forked(WRITER, migrated_settings.url, f"p{number}", has_stdin=True) for number in range(2)]
    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    assert sum(int(out) for out, _ in outputs) == 10
    assert await _count(database) == 10 + 2 * 100


async def test_value_survives_the_sigkill_of_its_writer(
    database: Database, migrated_settings: DatabaseSettings
) -> None:
    assert migrated_settings.url is not None
    process = forked(ENDLESS_WRITER, migrated_settings.url)
    for _ in range(50):
        await asyncio.to_thread(process.stdout.readline)
    process.kill()
    said = [line for line in process.stdout.read().splitlines() if line]
    await asyncio.to_thread(process.communicate, WAIT_SECONDS)
    last = int(said[-1]) if said else 49
    assert await _count(database) in (last + 1, last + 2)


@pytest.mark.parametrize("name", ["chat_key", "user_key", "store_key"])
async def test_key_above_the_limit_names_size_and_limit(database: Database, name: str) -> None:
    store = SqlKeyValueStore(database, StoreSettings())
    await store.set("a.b", **{**SCOPE, name: "k" * 1024}, value="v")
    with pytest.raises(InvalidValueError, match=f"{name} has 1025 characters, the limit is 1024"):
        await store.set("a.b", **{**SCOPE, name: "k" * 1025}, value="v")


async def test_value_limit_counts_bytes_and_names_size_limit_and_setting(database: Database) -> None:
    store = SqlKeyValueStore(database, StoreSettings(max_value_bytes=1024))
    await store.set("a.b", **SCOPE, value="é" * 512)
    with pytest.raises(InvalidValueError, match=r"1025 bytes.* 1024; keep large data"):
        await store.set("a.b", **SCOPE, value="é" * 512 + "x")
    assert await store.get("a.b", **SCOPE) == "é" * 512


async def test_value_of_sixteen_mebibytes_is_stored(database: Database) -> None:
    store = SqlKeyValueStore(database, StoreSettings())
    value = "0123456789abcdef" * (1 << 20)
    await store.set("a.b", **SCOPE, value=value)
    assert await store.get("a.b", **SCOPE) == value


async def test_lone_surrogates_are_stored_unchanged(database: Database) -> None:
    store = SqlKeyValueStore(database, StoreSettings())
    scope = {"chat_key": "\ud800", "user_key": "\udfff", "store_key": "\ufdd0d800"}
    await store.set("a.b", **scope, value="\udc80\0")
    assert await store.get("a.b", **scope) == "\udc80\0"
    assert await store.get("a.b", **{**scope, "chat_key": "\ud801"}) is None
    assert await store.purge("a.b") == 1


async def test_fresh_database_object_sees_what_was_set(
    database: Database, migrated_settings: DatabaseSettings, tmp_path: Path
) -> None:
    await SqlKeyValueStore(database, StoreSettings()).set("a.b", **SCOPE, value="v")
    other = Database(migrated_settings, tmp_path)
    assert await SqlKeyValueStore(other, StoreSettings()).get("a.b", **SCOPE) == "v"
    await other.dispose()
