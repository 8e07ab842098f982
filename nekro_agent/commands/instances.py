"""Commands as objects: subclasses of ``BaseCommand`` that a plugin gives to ``command_registry``."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from typing import Any

from pydantic import BaseModel, Field

from nekro_agent.commands.ctl import CmdCtl
from nekro_agent.commands.registration import Command, keep
from nekro_agent.commands.schemas import CommandExecutionContext, CommandPermission
from nekro_agent.errors import InvalidValueError

__all__ = ["BaseCommand", "CommandMetadata", "CommandRegistry", "command_registry"]


class CommandMetadata(BaseModel):
    """Name, permission and descriptions of a command."""

    name: str
    #: Accepted for compatibility; the command belongs to the plugin whose code registers it.
    namespace: str = ""
    aliases: list[str] = Field(default_factory=list)
    description: str = ""
    usage: str = ""
    permission: CommandPermission = CommandPermission.PUBLIC
    category: str = "general"
    #: As ``namespace``.
    source: str = ""
    tags: list[str] = Field(default_factory=list)
    #: Accepted for compatibility; the parameters follow from the signature of ``execute``.
    params_schema: dict[str, Any] | None = None
    internal: bool = False


class BaseCommand(ABC):
    """A command; ``execute`` has the parameters of a function of ``mount_command``."""

    @property
    @abstractmethod
    def metadata(self) -> CommandMetadata:
        """Describe the command; read once, when it is registered."""

    @abstractmethod
    async def execute(self, context: CommandExecutionContext, **kwargs: Any) -> Any:
        """Run the command: return a ``CommandResponse``, or yield several."""

    async def check_permission(self, context: CommandExecutionContext) -> tuple[bool, str | None]:
        """Return whether a user may run the command, and else the reason.

        A subclass may refuse more users than ``metadata.permission`` does, not fewer.
        """
        return context.may(self.metadata.permission), None


class CommandRegistry:
    """``command_registry`` of the reference."""

    def register(self, command: BaseCommand) -> None:
        """Register a command for the plugin whose module defines its class.

        A plugin calls it during its import or in its init.

        Raises:
            InvalidValueError: ``command`` is no object of a subclass of ``BaseCommand``.
        """
        if not isinstance(command, BaseCommand):
            raise InvalidValueError(
                f"command_registry.register needs an object of a subclass of BaseCommand, not {command!r}"
            )
        about = command.metadata
        keep(
            type(command).__module__,
            Command(
                name=about.name,
                description=about.description,
                aliases=tuple(about.aliases),
                permission=about.permission,
                usage=about.usage,
                category=about.category,
                tags=tuple(about.tags),
                internal=about.internal,
                func=_function_of(command),
            ),
        )


command_registry = CommandRegistry()


def _function_of(command: BaseCommand) -> Any:
    """Return a function with the signature of ``execute`` that checks the permission first."""

    @functools.wraps(command.execute)
    async def run(context: CommandExecutionContext, **arguments: Any) -> Any:
        is_allowed, reason = await command.check_permission(context)
        if not is_allowed:
            return CmdCtl.failed(reason or "you may not run this command")
        result: Any = command.execute(context, **arguments)
        return await result if inspect.isawaitable(result) else result

    return run
