"""The commands that a plugin registers, and groups of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from nekro_agent.commands.schemas import CommandPermission
from nekro_agent.schemas.i18n import I18nDict

__all__ = ["Command", "CommandGroup", "CommandOwner", "keep", "kept"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command."""

    name: str
    description: str
    aliases: tuple[str, ...]
    permission: CommandPermission
    usage: str
    category: str
    tags: tuple[str, ...]
    #: Not listed; meant as ``callback_cmd`` of another command.
    internal: bool
    func: Callable[..., Any]
    i18n_description: I18nDict | None = None
    i18n_usage: I18nDict | None = None
    i18n_category: I18nDict | None = None


#: Module → commands that it registered without naming its plugin.
_kept: Final[defaultdict[str, list[Command]]] = defaultdict(list)


def keep(module: str, command: Command) -> None:
    """Keep a command of a module until the host asks for those of its plugin with :func:`kept`."""
    _kept[module].append(command)


def kept(package: str) -> list[Command]:
    """Remove and return the kept commands of a package and its modules."""
    modules = [name for name in _kept if name == package or name.startswith(f"{package}.")]
    return [command for name in modules for command in _kept.pop(name)]


class CommandOwner(Protocol):
    """The part of a plugin that a group needs."""

    def add_command(self, command: Command) -> None:
        """Register a command."""
        ...


class CommandGroup:
    """Commands under one name: ``group.command("set")`` registers ``<group>.set``."""

    def __init__(
        self,
        owner: CommandOwner,
        name: str,
        description: str,
        *,
        permission: CommandPermission = CommandPermission.USER,
        category: str = "plugin",
        tags: list[str] | None = None,
    ) -> None:
        self._owner = owner
        self.name = name
        self.description = description
        self.permission = permission
        self.category = category
        self.tags = tags or []

    def command(
        self,
        name: str,
        description: str,
        aliases: list[str] | None = None,
        permission: CommandPermission | None = None,
        usage: str = "",
        category: str = "",
        tags: list[str] | None = None,
        internal: bool = False,
        i18n_description: I18nDict | None = None,
        i18n_usage: I18nDict | None = None,
        i18n_category: I18nDict | None = None,
    ) -> Callable[[F], F]:
        """Register a command of the group; omitted values are those of the group."""

        def decorate(func: F) -> F:
            self._owner.add_command(
                Command(
                    name=f"{self.name}.{name}",
                    description=description,
                    aliases=tuple(f"{self.name}.{alias}" for alias in aliases or ()),
                    permission=permission or self.permission,
                    usage=usage,
                    category=category or self.category,
                    tags=tuple(self.tags if tags is None else tags),
                    internal=internal,
                    func=func,
                    i18n_description=i18n_description,
                    i18n_usage=i18n_usage,
                    i18n_category=i18n_category,
                )
            )
            return func

        return decorate
