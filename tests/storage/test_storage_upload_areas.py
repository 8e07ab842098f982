"""Directories of chats' uploads: ids mapped in SQL, read by functions that cannot await."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageError, StorageUnavailableError
from nekro_agent.layout import encode_key
from storage.driver.blocking import blocking_engine
from storage.engine import Database
from storage.files.areas import DataAreas, UploadAreas

KEY = "k" * 64
CHAT = "onebot_v11-group:1/2"

#: Prints the names that one process of the fleet reads.
ASKER = """
import sys
from pathlib import Path
from broker_config.settings import DatabaseSettings
from storage.files.areas import UploadAreas
areas = UploadAreas(DatabaseSettings(url=sys.argv[1]), Path(sys.argv[2]), key="k" * 64)
sys.stdin.readline()
for number in range(40):
    print(areas.name(f"chat-{number}"))
"""


@pytest.fixture
def names(migrated_settings: DatabaseSettings, tmp_path: Path) -> Iterator[UploadAreas]:
    made = UploadAreas(migrated_settings, tmp_path, key=KEY)
    yield made
    made.dispose()


async def rows(database: Database) -> dict[str, str]:
    async with database.read() as tx:
        found = await tx.connection.execute(text("SELECT chat_name, directory FROM upload_areas"))
        return {chat_name: directory for chat_name, directory in found}


async def test_directory_of_uploads_is_named_by_an_id_that_sql_maps_to_its_chat(
    names: UploadAreas, database: Database, tmp_path: Path
) -> None:
    directory = DataAreas(tmp_path, uploads=names).uploads_dir(CHAT)
    assert directory.is_dir() and directory.parent == tmp_path / "uploads"
    assert re.fullmatch("~[0-9a-f]{32}", directory.name)
    assert await rows(database) == {encode_key(CHAT): directory.name}


@pytest.mark.slow
async def test_concurrent_processes_agree_on_a_name(
    migrated_settings: DatabaseSettings, database: Database, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", ASKER, str(migrated_settings.url), str(tmp_path)]
    askers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = []
    for asker in askers:
        assert asker.stdin is not None
        asker.stdin.write("\n")
        asker.stdin.flush()
    for asker in askers:
        answers.append(asker.communicate(timeout=WAIT_SECONDS)[0].split())
    assert answers[0] == answers[1] == answers[2] and len(set(answers[0])) == 40
    assert sorted((await rows(database)).values()) == sorted(answers[0])


async def test_concurrent_threads_agree_on_a_name(names: UploadAreas) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: names.name(CHAT), range(64)))) == 1


async def test_threads_that_ask_first_at_the_same_time_share_one_engine(
    names: UploadAreas, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, opened = Barrier(4), []

    def slowly(*args: Any, **options: Any) -> Engine:
        time.sleep(0.1)  # as the first import of SQLAlchemy
        opened.append(blocking_engine(*args, **options))
        return opened[-1]

    def ask(_: int) -> str:
        threads.wait(WAIT_SECONDS)
        return names.name(CHAT)

    monkeypatch.setattr("storage.files.areas.blocking_engine", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    for engine in opened[1:]:
        engine.dispose()
    assert len(opened) == 1


async def test_directory_of_an_older_version_keeps_its_name_and_its_files(
    names: UploadAreas, database: Database, tmp_path: Path
) -> None:
    old = DataAreas(tmp_path).uploads_dir(CHAT)
    (old / "sent.txt").write_text("sent before")
    found = DataAreas(tmp_path, uploads=names).uploads_dir(CHAT)
    assert (found / "sent.txt").read_text() == "sent before"
    assert await rows(database) == {encode_key(CHAT): old.name}


async def test_name_survives_a_change_of_the_signing_key(
    names: UploadAreas, migrated_settings: DatabaseSettings, tmp_path: Path
) -> None:
    before = names.name(CHAT)
    changed = UploadAreas(migrated_settings, tmp_path, key="another")
    assert changed.name(CHAT) == before
    assert changed.name("new chat") != names._id(encode_key("new chat"))
    changed.dispose()


async def test_name_cannot_be_derived_without_the_key(tmp_path: Path) -> None:
    ours, theirs = (UploadAreas(DatabaseSettings(), tmp_path, key=key) for key in ("ours", "theirs"))
    assert ours._id("chat") != theirs._id("chat")


async def test_a_read_inside_a_write_transaction_of_the_same_loop_does_not_deadlock(
    names: UploadAreas, database: Database
) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("another")
        # This call blocks the loop: the holder of the write lock cannot continue meanwhile.
        inside = names.name(CHAT)
    assert names.name(CHAT) == inside
    assert (await rows(database))[encode_key(CHAT)] == inside


async def test_claim_waits_for_no_other_transaction_that_claims_the_same_chat(
    names: UploadAreas, database: Database
) -> None:
    async with database.begin() as tx:
        row = {"chat": encode_key(CHAT), "directory": "elsewhere"}
        await tx.connection.execute(
            text("INSERT INTO upload_areas VALUES (:chat, :directory, CURRENT_TIMESTAMP)"), row
        )
        names.name(CHAT)
    assert names.name(CHAT) == "elsewhere", "once it is committed, the row is what counts"


async def test_two_chats_never_share_a_directory(names: UploadAreas, database: Database) -> None:
    async with database.begin() as tx:
        row = {"chat": "another", "directory": names._id(encode_key(CHAT))}
        await tx.connection.execute(
            text("INSERT INTO upload_areas VALUES (:chat, :directory, CURRENT_TIMESTAMP)"), row
        )
    with pytest.raises(StorageError, match="belongs to another chat"):
        names.name(CHAT)


@pytest.mark.extended
@settings(max_examples=200)
@given(key=st.text(min_size=1))
def test_no_chat_key_can_name_the_directory_of_another(key: str) -> None:
    assert not encode_key(key).startswith("~")


async def test_chat_named_like_the_directory_of_another_gets_its_own(
    names: UploadAreas, tmp_path: Path
) -> None:
    areas = DataAreas(tmp_path, uploads=names)
    victim = areas.uploads_dir(CHAT)
    assert areas.uploads_dir(victim.name) != victim
    assert areas.uploads_dir(f"../uploads/{victim.name}").parent == victim.parent


async def test_cached_names_are_returned_without_the_database(names: UploadAreas) -> None:
    name = names.name(CHAT)
    names.dispose()
    names._settings = DatabaseSettings(url="postgresql://127.0.0.1:1/x")
    names._opened = None
    assert names.name(CHAT) == name
    with pytest.raises(StorageUnavailableError):
        names.name("unknown")


async def test_container_keys_are_random_ids_that_sql_maps(database: Database, tmp_path: Path) -> None:
    """As with ``/app/shared`` from the start, no path contains the chat's key."""
    async with database.begin() as tx:
        chats = [await tx.chats.ensure(f"{CHAT}-{number}") for number in range(3)]
    directories = [DataAreas(tmp_path).shared_dir(chat.container_key).name for chat in chats]
    assert len(set(directories)) == 3
    assert all(re.fullmatch("sandbox_[0-9a-f]{32}", name) for name in directories)
