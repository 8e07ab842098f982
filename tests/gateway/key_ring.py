"""Keys of the API for tests whose clients need one."""

from __future__ import annotations

import asyncio
from typing import Any

from broker_config.settings import Settings
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key
from storage.engine import Database

__all__ = ["make_key"]


def make_key(settings: Settings, *scopes: Scope, **limits: Any) -> str:
    """Store a key that may read and post, or what is named, and return it."""

    async def make() -> str:
        new, key = new_key("test", scopes=scopes or (Scope.READ, Scope.POST), **limits)
        database = Database(settings.database, settings.data_dir)
        try:
            await store_key(database, new, by=None, request_id=None)
        finally:
            await database.dispose()
        return key

    return asyncio.run(make())
