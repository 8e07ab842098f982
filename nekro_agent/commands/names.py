"""Finds commands by name, alias and full name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nekro_agent.errors import InvalidValueError

__all__ = ["CommandNames", "Named"]

E = TypeVar("E")


@dataclass(frozen=True, kw_only=True)
class Named(Generic[E]):
    """A command with its names."""

    entry: E
    plugin_key: str
    name: str
    aliases: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """``<plugin key>:<name>``, which is unique."""
        return f"{self.plugin_key}:{self.name}"


class CommandNames(Generic[E]):
    """Commands by name; a name goes to the plugin that was loaded first."""

    def __init__(self, commands: Iterable[Named[E]], *, is_enabled: Callable[[str], bool]) -> None:
        """Index commands.

        Args:
            is_enabled: whether the plugin of a key is enabled; asked at each search.
        """
        self._by_name: dict[str, Named[E]] = {}
        self._is_enabled = is_enabled
        #: Names that two commands have; ``nekro plugins`` shows them.
        self.warnings: list[str] = []
        for command in commands:
            for name in (command.full_name, command.name, *command.aliases):
                self._claim(name, command)

    def find(self, name: str) -> E:
        """Return a command of an enabled plugin; ``name`` may begin with a slash.

        Raises:
            InvalidValueError: there is none; the message suggests similar names.
        """
        found = self._by_name.get(name.removeprefix("/"))
        if found is None or not self._is_enabled(found.plugin_key):
            known = [name for name, one in self._by_name.items() if self._is_enabled(one.plugin_key)]
            near = difflib.get_close_matches(name.removeprefix("/"), known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise InvalidValueError(f"there is no command {name!r}{hint}")
        return found.entry

    def _claim(self, name: str, command: Named[E]) -> None:
        owner = self._by_name.setdefault(name, command)
        if owner is not command:
            self.warnings.append(
                f"command {name} of {command.plugin_key} is shadowed by {owner.plugin_key}'s; "
                f"call it as {command.full_name}"
            )
