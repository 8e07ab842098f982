"""Parameters, input and output of commands."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, Field, PydanticUserError, TypeAdapter, ValidationError

from nekro_agent.errors import InvalidValueError
from nekro_agent.schemas.i18n import SupportedLang

__all__ = [
    "UNSET",
    "Arg",
    "ArgSpec",
    "CommandExecutionContext",
    "CommandOutputSegment",
    "CommandOutputSegmentType",
    "CommandPermission",
    "CommandResponse",
    "CommandResponseStatus",
    "Parameter",
    "parameters_of",
    "parse",
]


class CommandPermission(StrEnum):
    """Least permission that a command requires; users of the later levels may run it too."""

    PUBLIC = "public"
    USER = "user"
    ADVANCED = "advanced"
    SUPER_USER = "super_user"


class CommandResponseStatus(StrEnum):
    """State of a command after a response."""

    #: More responses follow.
    PROCESSING = "processing"
    #: The next input goes to ``callback_cmd``.
    WAITING = "waiting"
    SUCCESS = "success"
    ERROR = "error"


class CommandOutputSegmentType(StrEnum):
    """Kind of one part of a response."""

    TEXT = "text"
    IMAGE = "image"
    FILE = "file"


class CommandOutputSegment(BaseModel):
    """One part of a response."""

    type: CommandOutputSegmentType = CommandOutputSegmentType.TEXT
    text: str = ""
    file_path: str | None = None
    file_name: str | None = None
    mime_type: str | None = None
    web_url: str | None = None


class CommandResponse(BaseModel):
    """A response of a command."""

    status: CommandResponseStatus
    message: str = ""
    data: Any = None
    output_segments: list[CommandOutputSegment] | None = None
    callback_cmd: str | None = None
    wait_options: list[str] | None = None
    #: Seconds.
    wait_timeout: float | None = None
    on_timeout_message: str = ""
    context_data: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        """Whether this is the command's last response."""
        return self.status is not CommandResponseStatus.PROCESSING


class CommandExecutionContext(BaseModel):
    """The user and chat that a command runs for."""

    user_id: str = ""
    chat_key: str = ""
    username: str = ""
    adapter_key: str = ""
    is_super_user: bool = False
    is_advanced_user: bool = False
    lang: SupportedLang = SupportedLang.ZH_CN
    #: Id of the call; a line that is sent again under the id of an earlier call has the same.
    message_id: str = ""
    #: The value of ``CmdCtl.wait(context_data=…)``.
    context_data: dict[str, Any] = Field(default_factory=dict)

    def may(self, permission: CommandPermission) -> bool:
        """Whether the user may run commands of that level."""
        if permission is CommandPermission.PUBLIC or self.is_super_user:
            return True
        if permission is CommandPermission.USER:
            return self.is_advanced_user or bool(self.user_id)
        return permission is CommandPermission.ADVANCED and self.is_advanced_user


UNSET: Final = object()

#: A word, a quoted text, or ``key:value`` with an optionally quoted value.
_TOKEN = re.compile(
    r"""(?:(?P<key>[^\W\d]\w*):)?(?:"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>(?:\\.|[^'\\])*)'|(?P<bare>\S+))"""
)


class ArgSpec:
    """Describes a command's parameter, as its default or inside ``Annotated``."""

    def __init__(
        self,
        description: str = "",
        *,
        default: Any = UNSET,
        positional: bool = False,
        greedy: bool = False,
        choices: list[str] | None = None,
        range: tuple[Any, Any] | None = None,
        prompt_hint: str | None = None,
    ) -> None:
        """Describe the parameter.

        Args:
            default: if missing, the parameter is required.
            positional: may be given in order, without ``name:``.
            greedy: takes the rest of the text unchanged.
            range: smallest and largest value.
        """
        self.description = description
        self.default = default
        self.positional = positional
        self.greedy = greedy
        self.choices = choices
        self.range = range
        self.prompt_hint = prompt_hint


if TYPE_CHECKING:
    # Typed Any, so that ``name: str = Arg("…")`` passes a type checker.
    def Arg(
        description: str = "",
        *,
        default: Any = UNSET,
        positional: bool = False,
        greedy: bool = False,
        choices: list[str] | None = None,
        range: tuple[Any, Any] | None = None,
        prompt_hint: str | None = None,
    ) -> Any:
        """Describe a command's parameter."""

else:
    Arg = ArgSpec


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a command's function, after the context."""

    name: str
    annotation: Any
    arg: ArgSpec
    default: Any

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is UNSET

    def convert(self, text: str) -> Any:
        """Convert a text to the parameter's type.

        Raises:
            InvalidValueError: it does not match the type, the choices or the range.
        """
        if self.arg.choices and text not in self.arg.choices:
            raise InvalidValueError(f"{self.name} must be one of {', '.join(self.arg.choices)}, not {text!r}")
        try:
            value = TypeAdapter(self.annotation).validate_python(text)
        except ValidationError as exc:
            raise InvalidValueError(f"{self.name}: {text!r}: {exc.errors()[0]['msg']}") from exc
        except PydanticUserError:
            value = text  # a type that pydantic does not support: the plugin receives the text
        if self.arg.range is not None:
            low, high = self.arg.range
            if (low is not None and value < low) or (high is not None and value > high):
                raise InvalidValueError(f"{self.name} must lie between {low} and {high}, not {text!r}")
        return value


def parameters_of(func: Callable[..., Any]) -> list[Parameter]:
    """Return a command function's parameters without the first, which receives the context.

    Args:
        func: a function, or an object with ``__call__``.
    """
    try:
        annotated = func if inspect.isroutine(func) else type(func).__call__
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # an annotation names something undefined: arguments are passed as text
    found = []
    for parameter in list(inspect.signature(func).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = hints.get(parameter.name, str)
        arg = parameter.default if isinstance(parameter.default, ArgSpec) else None
        if typing.get_origin(annotation) is Annotated:
            annotation, *metadata = typing.get_args(annotation)
            arg = arg or next((item for item in metadata if isinstance(item, ArgSpec)), None)
        default = UNSET if parameter.default is parameter.empty else parameter.default
        if isinstance(default, ArgSpec) or (default is UNSET and arg is not None):
            default = arg.default if arg is not None else UNSET
        found.append(
            Parameter(
                name=parameter.name,
                annotation=annotation,
                arg=arg or ArgSpec(positional=True),
                default=default,
            )
        )
    return found


def parse(parameters: list[Parameter], text: str) -> dict[str, Any]:
    """Return the arguments in a text.

    ``key:value`` and ``key:"a value"`` name a parameter; other words fill the positional
    parameters in order; a greedy one takes the rest of the text.

    Raises:
        InvalidValueError: a required parameter is missing, a word is left over, or a value is
            invalid.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    given: dict[str, str] = {}
    words: list[tuple[str, int]] = []
    for match in _TOKEN.finditer(text):
        key = match["key"]
        if key in by_name and key not in given:
            given[key] = _content(match)
        else:
            word = match[0] if key is not None else _content(match)
            words.append((word, match.start()))
    for parameter in parameters:
        if parameter.name in given or not (parameter.arg.positional or parameter.arg.greedy) or not words:
            continue
        word, start = words.pop(0)
        if parameter.arg.greedy and words:
            given[parameter.name], words = text[start:].strip(), []
        else:
            given[parameter.name] = word
    if words:
        raise InvalidValueError(f"unexpected {words[0][0]!r}; parameters: {', '.join(by_name) or 'none'}")
    return _complete(parameters, given)


def _content(match: re.Match[str]) -> str:
    quoted = match["double"] if match["double"] is not None else match["single"]
    return match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def _complete(parameters: list[Parameter], given: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in given:
            values[parameter.name] = parameter.convert(given[parameter.name])
        elif parameter.required:
            hint = f" ({parameter.arg.description})" if parameter.arg.description else ""
            raise InvalidValueError(f"{parameter.name}{hint} is missing")
        else:
            values[parameter.name] = parameter.default
    return values
