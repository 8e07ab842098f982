"""The schema is created by migrations only, once, and equals the models."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from forked_code import forked
from sqlalchemy import Connection, inspect, text
from waiting import WAIT_SECONDS

import storage
from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.engine import Database
from storage.listings.turns import TurnFilter
from storage.migrate import check, configuration, locked, require_migrated, upgrade
from storage.schema import known_revisions, require_schema
from storage.states import StoredKind
from storage.tables import metadata

MIGRATIONS = Path(storage.__file__).parent / "migrations" / "versions"
UPGRADE = """
import asyncio, sys
from pathlib import Path
from typing import Any
from broker_config.settings import DatabaseSettings
from storage.migrate import upgrade
sys.stdin.readline()
asyncio.run(upgrade(DatabaseSettings(url=sys.argv[1]), Path()))
"""
#: Prints the modules of Alembic that checking, requiring and upgrading a migrated database loads.
RECOGNISE = """
import asyncio, json, sys
from pathlib import Path
from typing import Any
from broker_config.settings import DatabaseSettings
from storage.migrate import check, require_migrated, upgrade
settings = DatabaseSettings(url=sys.argv[1])
for step in (check, require_migrated, upgrade):
    asyncio.run(step(settings, Path()))
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "alembic"]))
"""


@pytest.mark.extended
async def test_migrations_build_the_schema_of_the_models(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    await upgrade(database_settings, tmp_path)
    with locked(database_settings, tmp_path) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


async def test_downgrade_leaves_nothing_behind(database_settings: DatabaseSettings, tmp_path: Path) -> None:
    await upgrade(database_settings, tmp_path)
    with locked(database_settings, tmp_path) as connection:
        command.downgrade(configuration(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]


async def test_status_distinguishes_empty_from_migrated(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    before = await check(database_settings, tmp_path)
    assert (before.reachable, before.revision, before.migrated) == (True, None, False)
    with pytest.raises(StorageUnavailableError, match="nekro db upgrade"):
        await require_migrated(database_settings, tmp_path)
    await upgrade(database_settings, tmp_path)
    await upgrade(database_settings, tmp_path)
    after = await check(database_settings, tmp_path)
    assert (after.migrated, after.revision) == (True, known_revisions()[-1])
    assert after.server.split()[0] in ("SQLite", "PostgreSQL")
    await require_migrated(database_settings, tmp_path)


async def test_status_names_the_error_and_no_password(tmp_path: Path) -> None:
    settings = DatabaseSettings(url="postgresql://me:hunter2@127.0.0.1:1/x")
    status = await check(settings, tmp_path)
    assert not status.reachable and "refused" in (status.problem or "")
    assert "hunter2" not in repr(status)
    with pytest.raises(StorageUnavailableError, match="cannot be reached"):
        await require_migrated(settings, tmp_path)


@pytest.mark.extended
async def test_a_migrated_database_is_recognised_without_alembic(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    await upgrade(database_settings, tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", RECOGNISE, str(database_settings.url)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == []


async def test_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = DatabaseSettings(url=f"sqlite:///{tmp_path}/file/x.db")
    assert "file" in ((await check(settings, tmp_path)).problem or "")


async def test_schema_of_a_newer_version_is_unchanged(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    await upgrade(database_settings, tmp_path)
    with locked(database_settings, tmp_path) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StorageUnavailableError, match=r"9999.*newer version"):
        await upgrade(database_settings, tmp_path)
    await require_migrated(database_settings, tmp_path)
    await asked_by_a_worker(database_settings, tmp_path)


async def asked_by_a_worker(settings: DatabaseSettings, data_dir: Path) -> None:
    database = Database(settings, data_dir)
    try:
        await require_schema(database)
    finally:
        await database.dispose()


async def test_a_worker_refuses_a_schema_that_is_missing_or_older(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    with pytest.raises(StorageUnavailableError, match=r"schema none, not .*nekro db upgrade"):
        await asked_by_a_worker(database_settings, tmp_path)
    await upgrade(database_settings, tmp_path)
    await asked_by_a_worker(database_settings, tmp_path)
    with locked(database_settings, tmp_path) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    with pytest.raises(StorageUnavailableError, match=r"schema 0001, not .*nekro db upgrade"):
        await asked_by_a_worker(database_settings, tmp_path)


def test_files_of_revisions_are_named_after_them(tmp_path: Path) -> None:
    scripts = ScriptDirectory(str(Path(storage.__file__).parent / "migrations"))
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(known_revisions())
    assert known_revisions()[-1] == scripts.get_current_head()


#: Each removes what the previous version may still use; permitted one release after its last use.
REMOVES = ("drop_column", "drop_table", "drop_constraint", "rename_table", "alter_column")


@pytest.mark.parametrize("path", sorted(MIGRATIONS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_upgrades_only_add(path: Path) -> None:
    tree = ast.parse(path.read_text())
    (step,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "upgrade"]
    called = {node.attr for node in ast.walk(step) if isinstance(node, ast.Attribute)}
    assert called.isdisjoint(REMOVES)
    columns = [node for node in ast.walk(step) if getattr(node, "attr", "") == "add_column"]
    code = ast.unparse(step)
    assert not columns or "nullable=True" in code or "server_default" in code


@pytest.mark.extended
async def test_processes_that_start_concurrently_migrate_once(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    assert database_settings.url is not None
    processes = [forked(UPGRADE, database_settings.url, has_stdin=True) for _ in range(3)]
    await asyncio.gather(*(asyncio.to_thread(process.communicate, WAIT_SECONDS) for process in processes))
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert (await check(database_settings, tmp_path)).migrated


async def test_older_chats_get_their_channels_and_those_who_wrote_become_users(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    with locked(database_settings, tmp_path) as connection:
        command.upgrade(configuration(connection), "0004")
        add_as_an_older_release(connection, "onebot_v11-group_1", "o\ufdd00000d-private_2", "demo")
        add_as_an_older_release(connection, "support/7", adapter="onebot_v11")
        for number, (chat, name) in enumerate(
            [("onebot_v11-group_1", "Ada"), ("support/7", "Ada L."), ("demo", "Ada"), ("demo", None)]
        ):
            connection.execute(
                text(
                    "INSERT INTO messages (id, chat_key, kind, sender_id, sender_name, text, created_at) "
                    "VALUES (:id, :chat, :kind, :sender, :name, 'hi', CURRENT_TIMESTAMP)"
                ),
                {
                    "id": f"m{number}",
                    "chat": chat,
                    "kind": "user" if name else "assistant",
                    "sender": "u1" if name else None,
                    "name": name,
                },
            )
    await upgrade(database_settings, tmp_path)
    database = Database(database_settings, tmp_path)
    with locked(database_settings, tmp_path) as connection:
        rows = connection.execute(
            text("SELECT chat_key, adapter_key, channel_id, channel_type, is_active FROM chats")
        ).all()
        add_as_an_older_release(connection, "discord-group:9")  # it still runs beside this one
    assert {tuple(row) for row in rows} == {
        ("demo", None, None, None, True),
        ("o\ufdd00000d-private_2", None, None, None, True),
        ("onebot_v11-group_1", "onebot_v11", "group_1", "group", True),
        ("support/7", "onebot_v11", None, None, True),
    }
    async with database.begin() as transaction:
        users = await transaction.records.users(platform_userid="u1", limit=9)
        later = await transaction.chats.get("discord-group:9")
        listed = await transaction.records.chats(chat_key="discord-group:9", limit=1)
        ensured = await transaction.chats.ensure("discord-group:9", channel_name="Friends")
    await database.dispose()
    assert [(user.adapter_key, user.username) for user in users] == [("", "Ada"), ("onebot_v11", "Ada L.")]
    assert (later.adapter_key, later.channel_id, later.channel_type) == ("discord", "group:9", "group")
    assert listed == [later] and later.starts_turns and later.preset_id is None
    assert (ensured.adapter_key, ensured.channel_name) == ("discord", "Friends")


def add_as_an_older_release(connection: Connection, *chat_keys: str, adapter: str | None = None) -> None:
    for key in chat_keys:
        connection.execute(
            text(
                "INSERT INTO chats (chat_key, container_key, adapter_key, created_at, history_after, fence) "
                "VALUES (:key, :key, :adapter, CURRENT_TIMESTAMP, 0, 0)"
            ),
            {"key": key, "adapter": adapter},
        )


async def test_keys_of_an_older_release_keep_nothing_stored_and_have_the_limit_of_the_settings(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    with locked(database_settings, tmp_path) as connection:
        command.upgrade(configuration(connection), "0022")
        connection.execute(
            text(
                "INSERT INTO api_keys (id, name, digest, scopes, chats, created_at)"
                " VALUES ('k', 'old', :digest, '[\"post\"]', '*', CURRENT_TIMESTAMP)"
            ),
            {"digest": b"d"},
        )
    await upgrade(database_settings, tmp_path)
    async with Database(database_settings, tmp_path) as database:
        async with database.begin() as tx:
            key = await tx.keys.get("k")
            assert (key.stored_bytes, key.stored_bytes_limit) == (0, None)
            tx.stored_bytes.add("key:k", StoredKind.MESSAGES, 10)
        async with database.read() as tx:
            assert (await tx.keys.get("k")).stored_bytes == 10
    with locked(database_settings, tmp_path) as connection:
        command.downgrade(configuration(connection), "0022")
        assert connection.execute(text("SELECT name FROM api_keys")).scalars().all() == ["old"]


async def test_turns_of_an_older_release_are_found_by_state_cost_model_and_plugin(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    insert = text(
        "INSERT INTO rounds (id, chat_key, turn_id, number, trigger_kind, trigger_id, state, attempt, fence,"
        " requested_at, not_before, finished_at, model, cost, calls, merged_into)"
        " VALUES (:id, 'chat', :turn, 1, 'manual', :id, :state, 1, 1, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP,"
        " CURRENT_TIMESTAMP, :model, :cost, :calls, :into)"
    )
    event = text(
        "INSERT INTO chat_events (chat_key, number, type, turn_id, data, created_at)"
        " VALUES ('chat', :number, 'turn.ended', :turn, :data, CURRENT_TIMESTAMP)"
    )
    calls = '[{"method":"a.b.f"},{"method":"a.b.g"}]'
    rounds = [
        # A round that is done and whose turn has failed; a turn whose event has expired; open turns.
        ("t1", "t1", "done", "m1", 1.0, calls, None),
        ("r2", "t1", "done", "m2", 0.5, None, None),
        ("t2", "t2", "failed", None, None, None, None),
        ("t3", "t3", "done", "m1", 1.0, None, None),
        ("r4", "t3", "running", None, None, None, None),
        ("t5", "t5", "merged", None, None, None, "r4"),
    ]
    with locked(database_settings, tmp_path) as connection:
        command.upgrade(configuration(connection), "0025")
        add_as_an_older_release(connection, "chat")
        names = ("id", "turn", "state", "model", "cost", "calls", "into")
        for row in rounds:
            connection.execute(insert, dict(zip(names, row, strict=True)))
        data = '{"state": "failed", "error": {"code": "turn_limit", "text": "x"}}'
        connection.execute(event, {"number": 1, "turn": "t1", "data": data})
    await upgrade(database_settings, tmp_path)
    async with Database(database_settings, tmp_path) as database, database.read() as tx:

        async def found(*states: str | None, **wanted: Any) -> list[str]:
            page = await tx.turn_search.page(TurnFilter(**wanted), states=states or None, limit=9)
            return [item.id for item in page]

        assert await found("failed") == ["t2", "t1"]
        assert await found(None) == ["t5", "t3"]
        assert await found(min_cost=1.5) == ["t1"]
        assert await found(model="m2") == await found(plugin="a.b") == ["t1"]
    with locked(database_settings, tmp_path) as connection:
        command.downgrade(configuration(connection), "0025")
        assert connection.execute(text("SELECT count(*) FROM rounds")).scalar() == len(rounds)
