"""Migrates a database to the schema of this version, and reports which schema it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, Engine, text

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageError, StorageUnavailableError
from storage.driver.blocking import blocking_engine
from storage.driver.urls import PoolMode, database_url, pool_mode
from storage.schema import is_newer, known_revisions, revision_of, too_old

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = ["DatabaseStatus", "check", "require_migrated", "upgrade"]

#: Key of PostgreSQL's advisory lock: the bytes of "nekro".
_LOCK_KEY: Final = int.from_bytes(b"nekro", "big")
#: As Alembic creates it, which also leaves it there, empty, when it removes all revisions.
_VERSION_TABLE: Final = """
CREATE TABLE IF NOT EXISTS alembic_version (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
)
"""
_INSERT_REVISION: Final = "INSERT INTO alembic_version (version_num) VALUES (:revision)"


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
        return too_old(self.revision)


async def upgrade(settings: DatabaseSettings, data_dir: Path) -> None:
    """Create or migrate the schema; does nothing when it is up to date.

    Several processes may call this concurrently: one migrates, the others wait for it.

    Raises:
        StorageUnavailableError: the database does not answer, or was migrated by a newer version, or is of a
            release before 0.2.0.
    """
    try:
        await asyncio.to_thread(_upgrade, settings, data_dir)
    except StorageUnavailableError as exc:
        status = await check(settings, data_dir)
        if not status.reachable:
            raise _unreachable(status) from exc
        raise


async def check(settings: DatabaseSettings, data_dir: Path) -> DatabaseStatus:
    """Report whether the database is reachable and migrated; a missing SQLite file is created."""
    return await asyncio.to_thread(_check, settings, data_dir)


async def require_migrated(settings: DatabaseSettings, data_dir: Path) -> None:
    """Return when the database is ready.

    Raises:
        StorageUnavailableError: it does not answer, or its schema is older or missing.
    """
    status = await check(settings, data_dir)
    if not status.reachable:
        raise _unreachable(status)
    if not status.migrated:
        raise StorageUnavailableError(
            f"database {status.url}: {status.too_old}"
            if status.too_old
            else f"database {status.url} has schema {status.revision or 'none'}, not {status.head}; "
            "run `nekro db upgrade`"
        )


def _unreachable(status: DatabaseStatus) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"database {status.url} cannot be reached ({status.problem}); "
        "start it, or correct NEKRO_DATABASE__URL"
    )


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
        current = revision_of(connection)
        if is_newer(current):
            raise StorageUnavailableError(
                f"the database has schema {current}, which is unknown to this version: "
                "a newer version migrated it; upgrade this installation"
            )
        if reason := too_old(current):
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
    connection.execute(text(_INSERT_REVISION), {"revision": known_revisions()[-1]})


def _check(settings: DatabaseSettings, data_dir: Path) -> DatabaseStatus:
    url = database_url(settings, data_dir).render_as_string(hide_password=True)
    head = known_revisions()[-1]
    try:
        with _engine(settings, data_dir) as engine, engine.connect() as connection:
            version = ".".join(str(part) for part in engine.dialect.server_version_info or ())
            is_sqlite = engine.dialect.name == "sqlite"
            revision = revision_of(connection)
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


@contextmanager
def _engine(settings: DatabaseSettings, data_dir: Path) -> Iterator[Engine]:
    engine = blocking_engine(database_url(settings, data_dir), settings)
    try:
        yield engine
    finally:
        engine.dispose()
