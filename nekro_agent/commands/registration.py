"""The commands that a plugin registers, as functions, groups and objects, and how they build responses."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandOutputSegment,
    CommandOutputSegmentType,
    CommandPermission,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.errors import InvalidValueError
from nekro_agent.schemas.i18n import I18nDict, resolve_i18n

__all__ = [
    "BaseCommand",
    "CmdCtl",
    "Command",
    "CommandGroup",
    "CommandMetadata",
    "CommandOwner",
    "CommandRegistry",
    "command_registry",
    "keep",
    "kept",
]


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


#: A text, a text in several languages, or parts.
Content: TypeAlias = str | I18nDict | list[CommandOutputSegment]


class CmdCtl:
    """Builds responses: ``return CmdCtl.success("done")``, or ``yield`` several."""

    @staticmethod
    def message(content: Content = "", *, data: Any = None) -> CommandResponse:
        """Send an intermediate message; the command continues."""
        return _response(CommandResponseStatus.PROCESSING, content, data)

    @staticmethod
    def success(content: Content = "", *, data: Any = None) -> CommandResponse:
        """End the command as successful."""
        return _response(CommandResponseStatus.SUCCESS, content, data)

    @staticmethod
    def failed(content: Content = "", *, data: Any = None) -> CommandResponse:
        """End the command as failed."""
        return _response(CommandResponseStatus.ERROR, content, data)

    @staticmethod
    def wait(
        message: str,
        callback_cmd: str,
        options: list[str] | None = None,
        timeout: float = 60.0,
        on_timeout_message: str = "",
        context_data: dict[str, Any] | None = None,
    ) -> CommandResponse:
        """Request more input, which is passed to the command ``callback_cmd``.

        Args:
            timeout: seconds to wait for the input.
        """
        return CommandResponse(
            status=CommandResponseStatus.WAITING,
            message=message,
            callback_cmd=callback_cmd,
            wait_options=options,
            wait_timeout=timeout,
            on_timeout_message=on_timeout_message,
            context_data=context_data,
        )


def _response(status: CommandResponseStatus, content: Content, data: Any) -> CommandResponse:
    segments: list[CommandOutputSegment] | None = None
    if isinstance(content, list):
        segments, text = list(content), ""
        if segments and segments[0].type is CommandOutputSegmentType.TEXT:
            text = segments.pop(0).text
    else:
        text = resolve_i18n(content)
    return CommandResponse(status=status, message=text, data=data, output_segments=segments or None)


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
