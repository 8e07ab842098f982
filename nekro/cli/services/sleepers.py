"""Reads and changes which plugins are awake in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from broker_config.settings import Settings
from nekro.app.listing.sleep import awake_plugins, brief_of, sleep, wake
from nekro.cli.services.database import open_database
from nekro_agent.errors import NotFoundError

if TYPE_CHECKING:
    from nekro.plugins.entries import PluginEntry

__all__ = ["change", "read"]


async def read(settings: Settings, chat_key: str, sleepers: Sequence[PluginEntry]) -> list[dict[str, Any]]:
    """Return the plugins that may sleep, as they are in the chat's next turn."""
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


async def change(
    settings: Settings, chat_key: str, plugin_key: str, *, is_awake: bool, turns: int | None
) -> bool:
    """Wake a plugin in a chat from its next turn on, or let it sleep; False if it slept already.

    Raises:
        NotFoundError: there is no such chat.
    """
    async with open_database(settings) as database, database.begin() as transaction:
        if await transaction.chats.find(chat_key) is None:
            raise NotFoundError(f"there is no chat {chat_key!r}")
        if not is_awake:
            return await sleep(transaction, chat_key, plugin_key)
        await sleep(transaction, chat_key, plugin_key)  # an operator's choice replaces every other one
        await wake(transaction, chat_key, plugin_key, turns=turns)
        return True
