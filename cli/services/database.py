"""Open the database of the settings, for commands that need nothing else of a running system."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from broker_config.settings import Settings

if TYPE_CHECKING:
    from storage.engine import Database

__all__ = ["open_database"]


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """Open the database; it is closed at the end.

    Raises:
        StorageUnavailableError: it does not answer, or is not migrated.
    """
    from storage.engine import Database
    from storage.migrate import require_migrated

    await require_migrated(settings.database, settings.data_dir)
    database = Database(settings.database, settings.data_dir)
    try:
        yield database
    finally:
        await database.dispose()
