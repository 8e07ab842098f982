"""Checks whether a database has the schema that this version needs.

Revisions are numbers with leading zeros, so their texts are in the order of the releases.
It does not import Alembic, because every process makes this check. A newer schema is accepted: a release
only adds to the schema of the previous release, and unused parts are removed in a later one
(docs/operations.md). Therefore workers of two versions run side by side, before and after the migration.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from loguru import logger
from sqlalchemy import Connection, inspect, text

from nekro_agent.errors import StorageUnavailableError
from storage.driver.urls import PoolMode
from storage.engine import Database
from storage.transaction import Transaction

__all__ = ["is_newer", "known_revisions", "require_schema", "revision_of", "too_old"]

_VERSIONS: Final = Path(__file__).parent / "migrations" / "versions"
_REVISION: Final = "SELECT version_num FROM alembic_version"
#: Return a row when Alembic's table exists.
_HAS_REVISION: Final = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'",
    "postgresql": "SELECT 1 WHERE to_regclass('alembic_version') IS NOT NULL",
}


@cache
def known_revisions() -> tuple[str, ...]:
    """Return the revisions of this version, oldest first: the leading numbers of the migration files."""
    return tuple(sorted(path.name.partition("_")[0] for path in _VERSIONS.glob("[0-9]*_*.py")))


def is_newer(revision: str | None) -> bool:
    """Whether a later version migrated the database."""
    return revision is not None and revision > known_revisions()[-1]


def too_old(revision: str | None) -> str:
    """Return why a database cannot be migrated by this version; "" if it can."""
    if revision is None or revision >= known_revisions()[0]:
        return ""
    return f"schema {revision} is of a release before 0.2.0: upgrade to 0.2.0 first"


async def require_schema(database: Database) -> None:
    """Return when the schema is the one that this version needs, or a newer one.

    Raises:
        StorageUnavailableError: the schema is older or missing, the database does not answer, or a
            connection pooler runs in transaction mode, which the URL does not name.
    """
    revision = await _checked_revision(database)
    needed = known_revisions()[-1]
    if is_newer(revision):
        logger.bind(schema=revision, known=needed).info("database_of_a_newer_version")
    elif revision != needed:
        name = database.url.render_as_string(hide_password=True)
        if reason := too_old(revision):
            raise StorageUnavailableError(f"database {name}: {reason}")
        raise StorageUnavailableError(
            f"database {name} has schema {revision or 'none'}, not {needed}; run `nekro db upgrade`"
        )


async def _checked_revision(database: Database) -> str | None:
    if database.pool_mode is PoolMode.TRANSACTION:
        # Not `read`, so that a pooler that permits no transactions is refused at the start.
        async with database.begin() as transaction:
            return await _revision(transaction)
    async with database.read() as transaction:
        if not database.is_sqlite:
            await _refuse_transaction_pooling(database, transaction)
        return await _revision(transaction)


async def _refuse_transaction_pooling(database: Database, transaction: Transaction) -> None:
    """Raise if another connection is served by the same server process while this one is open.

    There are no false positives; a pooler whose connections are all in use at the moment is not detected.
    """
    ours = await _server_process(transaction)
    other = Database(database.settings, Path())
    try:
        async with other.read() as second:
            theirs = await _server_process(second)
    finally:
        await other.dispose()
    if ours == theirs:
        raise StorageUnavailableError(
            f"{database.url.render_as_string(hide_password=True)} is a connection pooler in transaction mode "
            "(pgbouncer: pool_mode = transaction), which the URL does not say: add the parameter "
            "pool_mode=transaction to NEKRO_DATABASE__URL, or set pool_mode = session in pgbouncer"
        )


async def _server_process(transaction: Transaction) -> int:
    result = await transaction.connection.exec_driver_sql("SELECT pg_backend_pid()")
    return int(result.scalar_one())


async def _revision(transaction: Transaction) -> str | None:
    connection = transaction.connection
    if (await connection.exec_driver_sql(_HAS_REVISION[connection.dialect.name])).first() is None:
        return None
    found: str | None = (await connection.exec_driver_sql(_REVISION)).scalar()
    return found


def revision_of(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None when there is none yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text(_REVISION)).scalar()
    return found
