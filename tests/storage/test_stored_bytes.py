"""What keys keep stored: charged within their limit by any number of writers, and given back."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from broker_config.settings import RetentionSettings
from nekro_agent.errors import StorageQuotaError
from storage.accounts.keys import NewKey
from storage.accounts.stored_bytes import item_of_file
from storage.engine import Database
from storage.retention import delete_expired
from storage.states import StoredKind, account_of_key
from storage.tables import KEY_STORAGE

LIMIT = 1000


async def add_key(database: Database, key_id: str = "k", *, limit: int | None = LIMIT) -> None:
    async with database.begin() as tx:
        await tx.keys.add(NewKey(id=key_id, name="n", digest=b"d", scopes=["post"], stored_bytes_limit=limit))


async def stored(database: Database, key_id: str = "k") -> int:
    """Return what a key keeps stored, which its rows must add up to."""
    async with database.read() as tx:
        key = await tx.keys.get(key_id)
        total = select(func.coalesce(func.sum(KEY_STORAGE.c.bytes), 0)).where(KEY_STORAGE.c.key_id == key_id)
        assert (await tx.connection.execute(total)).scalar() == key.stored_bytes
    return key.stored_bytes


async def add(database: Database, size: int, *, kind: StoredKind = StoredKind.MESSAGES) -> None:
    async with database.begin() as tx:
        tx.stored_bytes.add(account_of_key("k"), kind, size)


async def test_writers_at_once_do_not_exceed_the_limit(database: Database) -> None:
    await add_key(database)
    results = await asyncio.gather(*(add(database, 150) for _ in range(20)), return_exceptions=True)
    assert [result for result in results if result is None] == [None] * 6
    refused = [result for result in results if result is not None]
    assert all(isinstance(error, StorageQuotaError) for error in refused), refused
    assert await stored(database) == 900


async def test_a_refused_transaction_writes_nothing(database: Database) -> None:
    await add_key(database)
    with pytest.raises(StorageQuotaError, match="keeps 0 of 1000 bytes stored, and 1001 more do not fit"):
        async with database.begin() as tx:
            await tx.chats.ensure("chat")
            tx.stored_bytes.add(account_of_key("k"), StoredKind.CHATS, LIMIT + 1)
    async with database.read() as tx:
        assert await tx.chats.find("chat") is None
    assert await stored(database) == 0


async def test_the_key_of_a_turn_is_charged_and_accounts_of_nobody_are_not(database: Database) -> None:
    await add_key(database)
    async with database.begin() as tx:
        await tx.keys.add_turn("k", "turn")
        for account_id in ("turn", "other", None):
            tx.stored_bytes.add(account_id, StoredKind.ROUNDS, 10)
    assert await stored(database) == 10


async def test_what_follows_from_admitted_work_counts_beyond_the_limit(database: Database) -> None:
    await add_key(database)
    async with database.begin() as tx:
        tx.stored_bytes.add(account_of_key("k"), StoredKind.ROUNDS, 2 * LIMIT, refuses=False)
    assert await stored(database) == 2 * LIMIT
    with pytest.raises(StorageQuotaError):
        await add(database, 1)


@pytest.mark.parametrize(("own", "limit"), [(None, 5000), (0, None), (7, 7)])
async def test_a_key_without_a_limit_of_its_own_has_that_of_the_settings(
    database: Database, own: int | None, limit: int | None
) -> None:
    database.settings = database.settings.model_copy(update={"key_bytes": 5000})
    await add_key(database, limit=own)
    most = 10**12 if limit is None else limit
    await add(database, most)
    if limit is not None:
        with pytest.raises(StorageQuotaError, match=f"of {limit} bytes"):
            await add(database, 1)


async def test_a_file_is_charged_once_and_given_back_when_it_is_removed(database: Database) -> None:
    await add_key(database)
    file = item_of_file("chat", "/app/uploads/a.txt")
    for _ in range(2):  # the second time the same content is stored already
        async with database.begin() as tx:
            reserved = await tx.stored_bytes.reserve("k", 400)
        assert await stored(database) >= 400
        async with database.begin() as tx:
            await tx.stored_bytes.settle(reserved, file, StoredKind.FILES)
    assert await stored(database) == 400
    async with database.begin() as tx:
        reserved = await tx.stored_bytes.reserve("k", 600)
    with pytest.raises(StorageQuotaError):
        async with database.begin() as tx:
            await tx.stored_bytes.reserve("k", 1)
    for item_id in (reserved, file, file):
        async with database.begin() as tx:
            await tx.stored_bytes.release(item_id)
    assert await stored(database) == 0


async def test_a_declaration_that_is_replaced_is_charged_to_who_replaced_it(database: Database) -> None:
    await add_key(database, "a")
    await add_key(database, "b")
    for key_id, size in (("a", 900), ("a", 800), ("b", 300)):
        async with database.begin() as tx:
            await tx.stored_bytes.hold(key_id, "declarations:x", StoredKind.DECLARATIONS, size)
    assert (await stored(database, "a"), await stored(database, "b")) == (0, 300)


async def test_retention_gives_back_what_it_deletes(database: Database) -> None:
    await add_key(database)
    await add_key(database, "other")
    for kind in StoredKind:
        await add(database, 10, kind=kind)
        async with database.begin() as tx:
            await tx.stored_bytes.hold("other", f"{kind}:x", kind, 10)
    keep = RetentionSettings(calls_days=7, rounds_days=60, messages_days=0, uploads_days=5)

    async def left(days: float) -> set[str]:
        """Return the kinds that are charged after so many days, and let the retention run."""
        async with database.begin() as tx:
            old = datetime.now(UTC) - timedelta(days=days)
            await tx.connection.execute(update(KEY_STORAGE).values(created_at=old))
        await delete_expired(database, keep, batch=1)
        async with database.read() as tx:
            kinds = list(await tx.connection.execute(select(KEY_STORAGE.c.key_id, KEY_STORAGE.c.kind)))
        of_each = [{row[1] for row in kinds if row[0] == key_id} for key_id in ("k", "other")]
        assert of_each[0] == of_each[1]
        assert await stored(database) == await stored(database, "other") == 10 * len(of_each[0])
        return {kind.value for kind in of_each[0]}

    kept = {"messages", "chats", "declarations"}
    assert await left(1.5) == {kind.value for kind in StoredKind}
    assert await left(2.5) == {*kept, "rounds", "calls", "files", "prompts"}
    assert await left(6.5) == {*kept, "rounds", "calls", "prompts"}
    assert await left(8.5) == {*kept, "rounds"}
    assert await left(61.5) == kept
    keep = keep.model_copy(update={"messages_days": 90})
    assert await left(91.5) == kept - {"messages"}


async def test_charging_and_giving_back_at_once_loses_nothing(database: Database) -> None:
    await add_key(database, limit=0)

    async def cycle(number: int) -> None:
        async with database.begin() as tx:
            reserved = await tx.stored_bytes.reserve("k", number)
        await add(database, 1)
        async with database.begin() as tx:
            await tx.stored_bytes.release(reserved)

    await asyncio.gather(*(cycle(number) for number in range(1, 21)))
    assert await stored(database) == 20
