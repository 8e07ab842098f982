"""The commands of the catalogue, by name."""

from __future__ import annotations

from collections.abc import Iterable

from nekro.plugins.entries import CommandEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.commands.names import CommandNames, Named

__all__ = ["command_names", "is_command", "listed_commands"]


def command_names(registry: Registry) -> CommandNames[CommandEntry]:
    """Index the commands of the registry's plugins."""
    return CommandNames(
        [
            Named(entry=one, plugin_key=one.plugin_key, name=one.name, aliases=one.aliases)
            for one in _commands(registry)
        ],
        is_enabled=registry.is_enabled,
    )


def is_command(line: str) -> bool:
    """Whether a line is a command; any other line is the answer to the question of one."""
    return line.lstrip().startswith("/")


def listed_commands(registry: Registry) -> list[CommandEntry]:
    """Return the commands that users may run."""
    return [one for one in _commands(registry) if registry.is_enabled(one.plugin_key) and not one.internal]


def _commands(registry: Registry) -> Iterable[CommandEntry]:
    return [command for plugin in registry.plugins for command in plugin.commands]
