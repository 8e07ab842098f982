"""A database of release 0.2.0, with a row in each table, is upgraded to the schema of a new one.

The dumps in ``data`` were made by the code of 0.2.0: its migrations, and one row per table by its models.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, select

from broker_config.settings import DatabaseSettings, StoreSettings
from nekro.extensions.webhooks.rows import WebhookRows
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.listings.chats import TurnFilter
from storage.migrate import check, known_revisions, locked, upgrade
from storage.states import CallState, RoundState
from storage.tables import metadata

DATA = Path(__file__).parent / "data"


@pytest.fixture
def older(database_settings: DatabaseSettings) -> DatabaseSettings:
    """A database as release 0.2.0 left it."""
    url = str(database_settings.url)
    kind = url.partition(":")[0].replace("postgresql", "postgres")
    dump = (DATA / f"release_0_2_0_{kind}.sql").read_text("utf-8")
    if kind == "sqlite":
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            file.executescript(dump)
        file.close()
    else:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(dump)  # type: ignore[call-overload]
    return database_settings


@pytest.mark.filterwarnings("ignore:.*expression-based index")  # their texts are compared below
async def test_a_database_of_release_0_2_0_gets_the_schema_of_a_new_one(
    older: DatabaseSettings, make_database: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    assert (await check(older, tmp_path)).revision == "0028"
    await upgrade(older, tmp_path)
    assert (await check(older, tmp_path)).revision == known_revisions()[-1]
    is_sqlite = str(older.url).startswith("sqlite")
    new = DatabaseSettings(url=f"sqlite:///{tmp_path}/new.db") if is_sqlite else make_database("postgres")
    await upgrade(new, tmp_path)
    with locked(older, tmp_path) as connection:
        upgraded = schema_of(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    with locked(new, tmp_path) as connection:
        assert upgraded == schema_of(connection)


def schema_of(connection: Connection) -> dict[str, Any]:
    """What determines how statements work: not the order of columns, nor the names of foreign keys."""
    found = inspect(connection)
    is_sqlite = connection.dialect.name == "sqlite"
    schema: dict[str, Any] = {}
    for table in found.get_table_names():
        columns = {
            column["name"]: (
                str(column["type"]),
                column["nullable"],
                (column["default"] or "").strip("'"),
                bool(column.get("identity")),
            )
            for column in found.get_columns(table)
        }
        references = {
            (
                *key["constrained_columns"],
                key["referred_table"],
                *key["referred_columns"],
                str(key["options"]),
            )
            for key in found.get_foreign_keys(table)
        }
        unique = {(key["name"], *key["column_names"]) for key in found.get_unique_constraints(table)}
        schema[table] = (columns, found.get_pk_constraint(table), references, unique)
    if is_sqlite:
        indexes = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        numbered = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE '%AUTOINCREMENT%'"
        schema["numbered"] = {row[0] for row in connection.exec_driver_sql(numbered)}
    else:
        indexes = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
    schema["indexes"] = {row[0]: re.sub(r"\s+", " ", row[1]) for row in connection.exec_driver_sql(indexes)}
    return schema


async def test_rows_of_release_0_2_0_are_read_after_the_upgrade(
    older: DatabaseSettings, tmp_path: Path
) -> None:
    await upgrade(older, tmp_path)
    async with Database(older, tmp_path) as database:
        async with database.read() as tx:
            for table in metadata.sorted_tables:
                if table.name.startswith(("file_", "parked_")):  # there were none
                    continue
                (row,) = await tx.connection.execute(select(table))
                assert len(row) == len(table.columns), table.name
            chat = await tx.chats.get("chat-1")
            assert (chat.adapter_key, chat.channel_id, chat.title) == (
                "onebot_v11",
                "group_1",
                "title of chats",
            )
            (message,) = await tx.messages.of_turn("rounds-1")
            assert message.text == "nul \0 and surrogate \udc80 and \ufdd0"
            (turn,) = await tx.turn_search.page(TurnFilter(model="m"), states=("done",), limit=9)
            (round_,) = await tx.turn_listing.rounds([turn.id])
            assert (round_.state, round_.model) == (RoundState.DONE, "m")
            call = await tx.calls.find("calls-1")
            assert call is not None and call.state is CallState.DONE and call.outcome == {"a": [1, "b", None]}
            job = await tx.jobs.find("jobs-1")
            assert job is not None and (job.task_id, job.percent) == ("task-1", 7)
            assert (await tx.approvals.get("approvals-1")).method == "author.plugin.pay"
            key = await tx.keys.get("api_keys-1")
            assert (key.scopes, key.stored_bytes) == (["post", "read"], 7)
            assert (await WebhookRows(tx.connection).get("webhooks-1")).events == ["message.*"]
            (user,) = await tx.records.users(platform_userid="user-1", limit=9)
            (preset,) = await tx.records.presets(preset_id=1, limit=9)
            assert (user.id, preset.id) == (1, 1)
        store = SqlKeyValueStore(database, StoreSettings())
        assert await store.count("author.plugin") == 1
        async with database.begin() as tx:
            assert (await tx.records.see_user("discord", "user-2", username="Ada")).id == 2
