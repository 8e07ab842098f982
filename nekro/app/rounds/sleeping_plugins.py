"""Plugins that sleep: prompts show them by a summary until they are woken for a number of turns.

All methods of a plugin that is asleep can be called. Whether it is awake is decided at the first round of
a turn and stays so, because the plugin that wakes in a turn is shown there by the result of the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, TypeAlias

from storage.repositories.plugin_states import Activation
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.plugins.entries import PluginEntry
    from nekro_agent.plugin import NekroPlugin

__all__ = ["MOST_TURNS", "AnyPlugin", "awake_plugins", "brief_of", "may_sleep", "sleep", "wake"]

#: A plugin can be woken for this many turns at most, or without a limit.
MOST_TURNS: Final = 20


#: A plugin of this process, or of the catalogue.
AnyPlugin: TypeAlias = "NekroPlugin | PluginEntry"


def may_sleep(plugin: AnyPlugin, *, keep_awake: Iterable[str] = ()) -> bool:
    """Whether a plugin sleeps unless it is woken.

    Args:
        keep_awake: patterns of plugin keys that do not.
    """
    if plugin.allow_sleep is False or any(fnmatchcase(plugin.key, pattern) for pattern in keep_awake):
        return False
    return plugin.allow_sleep is True or bool(plugin.sleep_brief.strip())


def brief_of(plugin: AnyPlugin) -> str:
    """Return what is shown of a plugin that is asleep."""
    return plugin.sleep_brief.strip() or plugin.description.strip() or plugin.name


async def awake_plugins(
    transaction: Transaction, chat_key: str, *, first_round: int
) -> dict[str, int | None]:
    """Return the keys of the plugins that were woken, with the turns left; None: no limit.

    Args:
        first_round: sequence of the first round of a turn; that turn is one of the turns left.
    """
    activations = await transaction.activations.of_chat(chat_key)
    woken = {key: found for key, found in activations.items() if found.after < first_round}
    limited = [found.after for found in woken.values() if found.turns is not None]
    begun: list[int] = []
    if limited:
        begun = await transaction.activations.turns_begun(
            chat_key, after=min(limited), before=first_round, limit=MOST_TURNS
        )
    left: dict[str, int | None] = {}
    for key, found in woken.items():
        if found.turns is None:
            left[key] = None
            continue
        rest = found.turns - sum(sequence > found.after for sequence in begun)
        if rest > 0:
            left[key] = rest
    return left


async def wake(
    transaction: Transaction,
    chat_key: str,
    plugin_key: str,
    *,
    turns: int | None,
    turn_id: str | None = None,
    adds: bool = False,
) -> int | None:
    """Wake a plugin in a chat, and return for how many turns it is awake; None: no limit.

    A plugin that is awake in the current turn counts this turn, any other the ones after it.

    Args:
        turns: 1 to ``MOST_TURNS``; None: until it is put to sleep. A plugin without a limit keeps none.
        turn_id: the turn of the call that wakes it; None outside of turns.
        adds: whether the turns are added to those left, up to ``MOST_TURNS``.
    """
    await transaction.chats.lock(chat_key, create=True)
    repository = transaction.activations
    newest = await repository.newest_round(chat_key)
    begun = None if turn_id is None else await repository.first_round(turn_id)
    first_round = newest + 1 if begun is None else begun
    awake = await awake_plugins(transaction, chat_key, first_round=first_round)
    activations = {
        key: found
        for key, found in (await repository.of_chat(chat_key)).items()
        if key in awake or found.after >= first_round
    }
    known = activations.get(plugin_key)
    have: int | None = 0
    if known is not None:
        have = awake.get(plugin_key, known.turns)
    if turns is not None and have is not None:
        turns = min(have + turns, MOST_TURNS) if adds else turns
    else:
        turns = None
    after = first_round - 1 if plugin_key in awake else newest
    activations[plugin_key] = Activation(after=after, turns=turns)
    await repository.replace(chat_key, activations)
    return turns


async def sleep(transaction: Transaction, chat_key: str, plugin_key: str) -> bool:
    """Put a plugin to sleep in a chat; False if it is asleep already."""
    await transaction.chats.lock(chat_key, create=True)
    activations = await transaction.activations.of_chat(chat_key)
    if activations.pop(plugin_key, None) is None:
        return False
    await transaction.activations.replace(chat_key, activations)
    return True
