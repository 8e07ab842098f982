"""The schema is created and migrated by one process at a time, and older and newer ones are recognised."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from forked_code import forked
from waiting import WAIT_SECONDS

import storage
from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.engine import Database
from storage.migrate import check, known_revisions, locked, require_schema, upgrade

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
from storage.engine import Database
from storage.migrate import check, require_schema, upgrade
settings = DatabaseSettings(url=sys.argv[1])
async def require(settings, data_dir):
    async with Database(settings, data_dir) as database:
        await require_schema(database)
for step in (check, require, upgrade):
    asyncio.run(step(settings, Path()))
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "alembic"]))
"""


async def test_status_distinguishes_empty_from_migrated(
    database_settings: DatabaseSettings, tmp_path: Path
) -> None:
    before = await check(database_settings, tmp_path)
    assert (before.reachable, before.revision, before.migrated) == (True, None, False)
    with pytest.raises(StorageUnavailableError, match="nekro db upgrade"):
        await asked_by_a_worker(database_settings, tmp_path)
    await upgrade(database_settings, tmp_path)
    await upgrade(database_settings, tmp_path)
    after = await check(database_settings, tmp_path)
    assert (after.migrated, after.revision) == (True, known_revisions()[-1])
    assert after.server.split()[0] in ("SQLite", "PostgreSQL")
    await asked_by_a_worker(database_settings, tmp_path)


async def test_status_names_the_error_and_no_password(tmp_path: Path) -> None:
    settings = DatabaseSettings(url="postgresql://me:hunter2@127.0.0.1:1/x")
    status = await check(settings, tmp_path)
    assert not status.reachable and "refused" in (status.problem or "")
    assert "hunter2" not in repr(status)
    with pytest.raises(StorageUnavailableError, match="cannot be reached"):
        await asked_by_a_worker(settings, tmp_path)


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
    for step in (asked_by_a_worker, upgrade):
        with locked(database_settings, tmp_path) as connection:
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0017'")
        with pytest.raises(StorageUnavailableError, match=r"schema 0017 .*upgrade to 0\.2\.0 first"):
            await step(database_settings, tmp_path)
    status = await check(database_settings, tmp_path)
    assert status.too_old and not status.migrated and not status.is_newer


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
