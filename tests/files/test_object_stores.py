"""What every store of objects promises, on a directory and on two servers of S3."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from faulty_store import Faults, FaultyStore
from s3_process import BUCKET, SECRET

from nekro_agent.errors import SettingsError, StorageError, StorageUnavailableError
from storage.files.stores.bucket import BucketStore
from storage.files.stores.opening import open_store
from storage.files.stores.store import PART_BYTES, ObjectStore, StoredObject


async def listed(store: ObjectStore) -> dict[str, int]:
    return {found.key: found.size_bytes async for batch in _batches(store) for found in batch}


async def _batches(store: ObjectStore) -> AsyncIterator[list[StoredObject]]:
    async for batch in store.list():
        yield batch


async def test_an_object_is_read_as_it_was_stored(store: ObjectStore) -> None:
    await store.put("ab12.1", b"content")
    await store.put("cd34.2", b"")
    assert await store.get("ab12.1") == b"content"
    assert await store.get("cd34.2") == b""
    assert await store.size("ab12.1") == 7
    assert await listed(store) == {"ab12.1": 7, "cd34.2": 0}


async def test_an_object_that_is_missing_is_none(store: ObjectStore) -> None:
    assert await store.get("ab12.1") is None
    assert await store.size("ab12.1") is None
    assert await listed(store) == {}


async def test_storing_an_object_again_is_a_success(store: ObjectStore) -> None:
    for _ in range(2):
        await store.put("ab12.1", b"content")
    assert await store.get("ab12.1") == b"content"
    await asyncio.gather(*(store.put("ab12.2", b"content") for _ in range(8)))
    assert await store.get("ab12.2") == b"content"


async def test_deleted_objects_are_gone_and_deleting_them_again_is_a_success(store: ObjectStore) -> None:
    keys = [f"ab{number}.{number}" for number in range(12)]
    for key in keys:
        await store.put(key, b"x")
    await store.delete(keys[:11])
    await store.delete(keys[:11])
    await store.delete([])
    assert await listed(store) == {keys[11]: 1}


async def test_an_object_of_the_greatest_size_is_one_request(store: ObjectStore) -> None:
    data = bytes(range(256)) * (PART_BYTES // 256)
    await store.put("ab12.1", data)
    assert await store.get("ab12.1") == data


async def test_a_listing_has_more_objects_than_one_batch(store: ObjectStore) -> None:
    keys = {f"{number:04}.{number}" for number in range(1100)}
    queue = asyncio.Semaphore(16)

    async def put(key: str) -> None:
        async with queue:
            await store.put(key, b"x")

    await asyncio.gather(*map(put, keys))
    assert set(await listed(store)) == keys


async def test_requests_that_are_refused_at_first_succeed(faulty: FaultyStore) -> None:
    store = BucketStore(f"s3://{BUCKET}/refused")
    seen: set[str] = set()

    def first(method: str, target: str) -> bool:
        is_first = f"{method} {target}" not in seen
        seen.add(f"{method} {target}")
        return is_first

    faulty.faults = Faults(refuses=first)
    await store.put("ab12.1", b"content")
    assert await store.get("ab12.1") == b"content"
    assert await store.size("ab12.1") == 7
    assert await listed(store) == {"ab12.1": 7}
    await store.delete(["ab12.1"])
    assert await store.get("ab12.1") is None
    assert faulty.faults.counts.total() >= 5


@pytest.mark.parametrize("fault", ["loses_answer", "repeats"])
async def test_a_request_that_the_store_carries_out_twice_has_one_effect(
    faulty: FaultyStore, fault: str
) -> None:
    store = BucketStore(f"s3://{BUCKET}/{fault}")
    times = iter([True])

    def once(method: str, _target: str) -> bool:
        return method == "PUT" and next(times, False)

    faulty.faults = Faults(**{fault: once})
    await store.put("ab12.1", b"content")
    assert faulty.passed["PUT"] == 2
    faulty.faults = Faults()
    assert await store.get("ab12.1") == b"content"


async def test_a_store_that_does_not_answer_is_unavailable(faulty: FaultyStore) -> None:
    store = BucketStore(
        f"s3://{BUCKET}/slow", attempt=timedelta(seconds=0.2), patience=timedelta(seconds=0.5)
    )
    faulty.faults = Faults(hangs=lambda _method, _target: True)
    with pytest.raises(StorageUnavailableError, match=r"read object ab12\.1"):
        await store.get("ab12.1")


async def test_a_store_that_refuses_for_long_is_unavailable(faulty: FaultyStore) -> None:
    store = BucketStore(f"s3://{BUCKET}/busy", patience=timedelta(seconds=0.2))
    faulty.faults = Faults(refuses=lambda _method, _target: True)
    with pytest.raises(StorageUnavailableError, match="503"):
        await store.put("ab12.1", b"content")


async def test_errors_name_the_reason_and_no_secret(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket") as missing:
        await BucketStore("s3://another-bucket").get("ab12.1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET + "!")
    store = BucketStore(f"s3://{BUCKET}/denied")
    try:
        await store.put("ab12.1", b"content")
    except StorageError as exc:  # moto checks no signatures
        assert "403" in str(exc) and "credentials" in str(exc)
        assert SECRET not in f"{exc!r}{exc.__cause__!r}"
    assert missing.value.__cause__ is None


async def test_unfinished_files_of_a_directory_are_no_objects(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    await store.put("ab12.1", b"content")
    (tmp_path / "ab" / ".0123456789abcdef.part").write_bytes(b"half")
    assert await listed(store) == {"ab12.1": 7}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/files", "must be"),
        ("file://host/files", "must be"),
        ("file:///", "must be"),
        ("s3://", "must be"),
        ("/srv/files", "must be"),
        ("s3://key:secret@bucket/files", "more than a place"),
        ("s3://bucket/files?access_key_id=secret", "more than a place"),
        ("s3://key:a/secret@bucket/files", "more than a place"),
        ("s3://key:secret?a@bucket/files", "more than a place"),
        ("s3://key:secret#a@bucket", "more than a place"),
        ("s3://[secret/files", "no URL"),
        ("file:files", "must be"),
        ("file:///files ", "remove spaces"),
        ("s3://bucket\n/files", "remove spaces"),
        ("file:///files%00", "remove spaces"),
        ("s3://bucket//files", "empty name"),
    ],
)
def test_urls_that_name_no_store_are_refused(url: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_a_bucket_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SettingsError, match=r"nekro-workers\[objects\]"):
        open_store("s3://bucket/files")
