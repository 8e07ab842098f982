"""Open the database and the files of a chat, for commands that call no method."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from broker_config.settings import Settings
from nekro_agent.errors import NotFoundError, StorageError
from nekro_agent.ports import ChatInfo

if TYPE_CHECKING:
    from nekro.app.chats.files import ChatFiles
    from nekro.plugins.entries import PluginEntry
    from storage.engine import Database

__all__ = [
    "change_sleeper",
    "follow_shared_time",
    "open_chat_files",
    "open_database",
    "read_sleepers",
]


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """Open the database; it is closed at the end.

    Raises:
        StorageUnavailableError: it does not answer, or is not migrated.
    """
    from storage.engine import Database
    from storage.migrate import require_schema

    async with Database(settings.database, settings.data_dir) as database:
        await require_schema(database, refuses_pooler=False)
        yield database


@contextmanager
def open_chat_files(settings: Settings, chat: ChatInfo) -> Iterator[ChatFiles]:
    """Open the areas of a chat; ``settings`` as the workers have them."""
    from broker_config.embedded import resolve_signing_key
    from nekro.app.chats.files import ChatFiles
    from storage.files import DataAreas, UploadAreas

    key = resolve_signing_key(settings).get_secret_value()
    uploads = UploadAreas(settings.database, settings.data_dir, key=key)
    try:
        yield ChatFiles(settings, DataAreas(settings.data_dir, uploads=uploads), chat)
    finally:
        uploads.dispose()


async def read_sleepers(
    settings: Settings, chat_key: str, sleepers: Sequence[PluginEntry]
) -> list[dict[str, Any]]:
    """Return the plugins that may sleep, as they are in the chat's next turn."""
    from nekro.app.rounds.sleeping_plugins import awake_plugins, brief_of

    async with open_database(settings) as database, database.read() as transaction:
        newest = await transaction.activations.newest_round(chat_key)
        awake = await awake_plugins(transaction, chat_key, first_round=newest + 1)
    return [
        {
            "key": plugin.key,
            "name": plugin.name,
            "is_awake": plugin.key in awake,
            "turns_left": awake.get(plugin.key),
            "brief": brief_of(plugin),
        }
        for plugin in sleepers
    ]


async def change_sleeper(
    settings: Settings, chat_key: str, plugin_key: str, *, is_awake: bool, turns: int | None
) -> bool:
    """Wake a plugin in a chat from its next turn on, or let it sleep; False if it slept already.

    Raises:
        NotFoundError: there is no such chat.
    """
    from nekro.app.rounds.sleeping_plugins import sleep, wake

    async with open_database(settings) as database, database.begin() as transaction:
        if await transaction.chats.find(chat_key) is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
        if not is_awake:
            return await sleep(transaction, chat_key, plugin_key)
        await sleep(transaction, chat_key, plugin_key)  # an operator's choice replaces every other one
        await wake(transaction, chat_key, plugin_key, turns=turns)
        return True


def follow_shared_time(settings: Settings) -> None:
    """Make this process use the database's clock; when the database does not answer, the host's is used.

    For commands that write or compare timestamps of the system without opening the services. Blocks.
    """
    import asyncio

    from storage.engine import Database, follow_database_clock

    async def follow() -> None:
        async with Database(settings.database, settings.data_dir) as database:
            with contextlib.suppress(StorageError):
                await follow_database_clock(database)

    asyncio.run(follow())
