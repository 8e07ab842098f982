"""Creates and migrates the schema, and checks whether a database has the one that this version needs.

Every process makes that check, so it imports neither Alembic nor SQLAlchemy. A newer schema is accepted: a
release only adds to the schema of the previous release, and unused parts are removed in a later one
(docs/operations.md). Therefore workers of two versions run side by side, before and after the migration.
Revisions are numbers with leading zeros, so their texts are in the order of the releases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageError, StorageUnavailableError
from storage.driver.blocking import blocking_engine
from storage.driver.urls import PoolMode, database_url, pool_mode
from storage.engine import Database
from storage.transaction import Transaction

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy import Connection, Engine

__all__ = ["DatabaseStatus", "check", "is_newer", "known_revisions", "require_schema", "upgrade"]

_VERSIONS: Final = Path(__file__).parent / "migrations" / "versions"
_REVISION: Final = "SELECT version_num FROM alembic_version"
#: Return a row when Alembic's table exists.
_HAS_REVISION: Final = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'",
    "postgresql": "SELECT 1 WHERE to_regclass('alembic_version') IS NOT NULL",
}
#: As Alembic creates it, which also leaves it there, empty, when it removes all revisions.
_VERSION_TABLE: Final = """
CREATE TABLE IF NOT EXISTS alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)
"""
#: Key of PostgreSQL's advisory lock: the bytes of "nekro".
_LOCK_KEY: Final = int.from_bytes(b"nekro", "big")


@cache
def known_revisions() -> tuple[str, ...]:
    """Return the revisions of this version, oldest first: the leading numbers of the migration files."""
    return tuple(sorted(path.name.partition("_")[0] for path in _VERSIONS.glob("[0-9]*_*.py")))


def is_newer(revision: str | None) -> bool:
    """Whether a later version migrated the database."""
    return revision is not None and revision > known_revisions()[-1]


def _too_old(revision: str | None) -> str:
    """Return why a database cannot be migrated by this version; "" if it can."""
    if revision is None or revision >= known_revisions()[0]:
        return ""
    return f"schema {revision} is of a release before 0.2.0: upgrade to 0.2.0 first"


@dataclass(frozen=True, kw_only=True)
class DatabaseStatus:
    """The result of ``check``."""

    #: The URL without its password.
    url: str
    #: ``"SQLite 3.40.1"`` or ``"PostgreSQL 16.2"``; empty when unreachable.
    server: str = ""
    #: Pool mode that the URL of a PostgreSQL names; None for SQLite and when unreachable.
    pool_mode: PoolMode | None = None
    #: Revision of the schema; None when there is none yet.
    revision: str | None = None
    #: Revision that this version needs.
    head: str
    #: Why the database cannot be reached; None when it can.
    problem: str | None = None

    @property
    def reachable(self) -> bool:
        """Whether the database answered."""
        return self.problem is None

    @property
    def migrated(self) -> bool:
        """Whether the schema is the one that this version needs, or a newer one, which is compatible."""
        return self.revision == self.head or self.is_newer

    @property
    def is_newer(self) -> bool:
        """Whether a later version migrated the database."""
        return is_newer(self.revision)

    @property
    def too_old(self) -> str:
        """Why this version cannot migrate the database; "" if it can."""
        return _too_old(self.revision)


async def require_schema(database: Database, *, refuses_pooler: bool = True) -> None:
    """Return when the schema is the one that this version needs, or a newer one.

    Args:
        refuses_pooler: refuse a connection pooler in transaction mode that the URL does not name, which takes
            a second connection. Commands do not look for one.

    Raises:
        StorageUnavailableError: the schema is older or missing, the database does not answer, or there is
            such a pooler.
    """
    revision = await _checked_revision(database, refuses_pooler=refuses_pooler)
    needed = known_revisions()[-1]
    if is_newer(revision):
        logger.bind(schema=revision, known=needed).info("database_of_a_newer_version")
    elif revision != needed:
        name = database.url.render_as_string(hide_password=True)
        if reason := _too_old(revision):
            raise StorageUnavailableError(f"database {name}: {reason}")
        raise StorageUnavailableError(
            f"database {name} has schema {revision or 'none'}, not {needed}; run `nekro db upgrade`"
        )


async def _checked_revision(database: Database, *, refuses_pooler: bool) -> str | None:
    try:
        if database.pool_mode is PoolMode.TRANSACTION:
            # Not `read`, so that a pooler that permits no transactions is refused at the start.
            async with database.begin() as transaction:
                return await _revision(transaction)
        async with database.read() as transaction:
            ours = await _server_process(transaction) if refuses_pooler and not database.is_sqlite else None
            revision = await _revision(transaction)
            theirs = None if ours is None else await _other_server_process(database)
    except StorageUnavailableError as exc:
        raise _unreachable(database.url.render_as_string(hide_password=True), str(exc)) from exc
    # Two open connections with one server process. There are no false positives; a pooler whose connections
    # are all in use at the moment is not detected.
    if ours is not None and ours == theirs:
        raise StorageUnavailableError(
            f"{database.url.render_as_string(hide_password=True)} is a connection pooler in transaction mode "
            "(pgbouncer: pool_mode = transaction), which the URL does not say: add the parameter "
            "pool_mode=transaction to NEKRO_DATABASE__URL, or set pool_mode = session in pgbouncer"
        )
    return revision


async def _other_server_process(database: Database) -> int:
    other = Database(database.settings, Path())
    try:
        async with other.read() as second:
            return await _server_process(second)
    finally:
        await other.dispose()


async def _server_process(transaction: Transaction) -> int:
    result = await transaction.connection.exec_driver_sql("SELECT pg_backend_pid()")
    return int(result.scalar_one())


async def _revision(transaction: Transaction) -> str | None:
    connection = transaction.connection
    if (await connection.exec_driver_sql(_HAS_REVISION[connection.dialect.name])).first() is None:
        return None
    found: str | None = (await connection.exec_driver_sql(_REVISION)).scalar()
    return found


def _unreachable(url: str, problem: str | None) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"database {url} cannot be reached ({problem}); start it, or correct NEKRO_DATABASE__URL"
    )


async def upgrade(settings: DatabaseSettings, data_dir: Path) -> None:
    """Create or migrate the schema; does nothing when it is up to date.

    Several processes may call this concurrently: one migrates, the others wait for it.

    Raises:
        StorageUnavailableError: the database does not answer, was migrated by a newer version, or is of a
            release before 0.2.0.
    """
    try:
        await asyncio.to_thread(_upgrade, settings, data_dir)
    except StorageUnavailableError as exc:
        status = await check(settings, data_dir)
        if not status.reachable:
            raise _unreachable(status.url, status.problem) from exc
        raise


async def check(settings: DatabaseSettings, data_dir: Path) -> DatabaseStatus:
    """Report whether the database is reachable and migrated; a missing SQLite file is created."""
    return await asyncio.to_thread(_check, settings, data_dir)


def configuration(connection: Connection) -> Config:
    """Return Alembic's configuration for a connection in a transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@contextmanager
def locked(settings: DatabaseSettings, data_dir: Path) -> Iterator[Connection]:
    """Open a transaction that excludes every other migration of the database."""
    with _engine(settings, data_dir) as engine, engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")
        try:
            yield connection
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


def _upgrade(settings: DatabaseSettings, data_dir: Path) -> None:
    with locked(settings, data_dir) as connection:
        current = _revision_of(connection)
        if is_newer(current):
            raise StorageUnavailableError(
                f"the database has schema {current}, which is unknown to this version: "
                "a newer version migrated it; upgrade this installation"
            )
        if reason := _too_old(current):
            raise StorageUnavailableError(f"the database cannot be migrated: {reason}")
        if current is None:
            _create(connection)
        elif current != known_revisions()[-1]:
            from alembic import command  # a slow import that only a migration needs

            command.upgrade(configuration(connection), "head")


def _create(connection: Connection) -> None:
    """Create the newest schema. A table that exists is an error: it is not known what it contains."""
    from storage.tables import metadata

    metadata.create_all(connection, checkfirst=False)
    connection.exec_driver_sql(_VERSION_TABLE)
    head = known_revisions()[-1]
    connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{head}')")  # noqa: S608 - our file's name


def _check(settings: DatabaseSettings, data_dir: Path) -> DatabaseStatus:
    url = database_url(settings, data_dir).render_as_string(hide_password=True)
    head = known_revisions()[-1]
    try:
        with _engine(settings, data_dir) as engine, engine.connect() as connection:
            version = ".".join(str(part) for part in engine.dialect.server_version_info or ())
            is_sqlite = engine.dialect.name == "sqlite"
            revision = _revision_of(connection)
            connection.rollback()
    except StorageError as exc:
        return DatabaseStatus(url=url, head=head, problem=str(exc))
    return DatabaseStatus(
        url=url,
        server=f"{'SQLite' if is_sqlite else 'PostgreSQL'} {version}",
        pool_mode=None if is_sqlite else pool_mode(settings),
        revision=revision,
        head=head,
    )


def _revision_of(connection: Connection) -> str | None:
    """Return the revision of the database's schema; None when there is none yet."""
    if connection.exec_driver_sql(_HAS_REVISION[connection.dialect.name]).first() is None:
        return None
    found: str | None = connection.exec_driver_sql(_REVISION).scalar()
    return found


@contextmanager
def _engine(settings: DatabaseSettings, data_dir: Path) -> Iterator[Engine]:
    engine = blocking_engine(database_url(settings, data_dir), settings)
    try:
        yield engine
    finally:
        engine.dispose()
