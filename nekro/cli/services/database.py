"""Open the database, and services that are not started, for commands that call no method."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from broker_config.settings import Settings

if TYPE_CHECKING:
    from nekro.app.composition import Services
    from storage.engine import Database

__all__ = ["open_database", "open_writers"]


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """Open the database; it is closed at the end.

    Raises:
        StorageUnavailableError: it does not answer, or is not migrated.
    """
    from storage.engine import Database
    from storage.migrate import require_migrated

    await require_migrated(settings.database, settings.data_dir)
    async with Database(settings.database, settings.data_dir) as database:
        yield database


@asynccontextmanager
async def open_writers(settings: Settings) -> AsyncIterator[Services]:
    """Build the services with which a command writes rows and publishes events; they are not started.

    Raises:
        StorageUnavailableError: the database does not answer, or is not migrated.
        SettingsError: the signing key cannot be read.
    """
    from nekro.app.composition import CALLER, Services
    from storage.database_clock import follow_database_clock
    from storage.migrate import require_migrated

    await require_migrated(settings.database, settings.data_dir)
    services = Services.load(settings, role=CALLER)
    try:
        await follow_database_clock(services.database)
        yield services
    finally:
        await services.close()
