"""The interface of a command module, arguments that several commands share, questions at the terminal."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from broker_config.settings import Settings
from nekro.cli.output import Output, one_line
from nekro_agent.errors import NotFoundError, UsageError

__all__ = [
    "DEFAULT_CHAT_KEY",
    "CommandModule",
    "Deps",
    "action_option",
    "arg",
    "args_from",
    "chat_key",
    "chat_key_option",
    "chosen_id",
    "confirm",
    "count",
    "declare",
    "json_flag",
    "not_blank",
    "operator",
    "port_number",
    "port_or_any",
    "positive_int",
    "positive_number",
    "read_text",
    "supervisor_fd_option",
    "user_id_option",
    "warn_of_root",
    "whole_number",
]


#: Chat key used when ``--chat-key`` is not given.
DEFAULT_CHAT_KEY: Final = "cli"

_ID_COLUMNS: Final = 40

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True)
class Deps:
    """What a command receives besides its own arguments."""

    output: Output
    #: Value of ``--data-dir``; None when it was not given.
    data_dir: Path | None
    #: Reads environment, ``.env`` and the global options; raises SettingsError.
    load_settings: Callable[[], Settings]


class CommandModule(Protocol):
    """The interface of each module in ``nekro.cli.commands``.

    A command that works over a gateway, too, asks ``nekro.cli.api`` (``OVER_API`` of ``nekro.cli.main``).
    """

    #: Frozen dataclass; each field is declared with ``arg``.
    Args: type
    #: Examples and explanations below the help; may be "".
    EPILOG: str

    def run(self, args: Any, deps: Deps) -> int:
        """Run the command; returns the exit code, raises errors of ``nekro_agent.errors``."""
        ...


def arg(*flags: str, **options: Any) -> Any:
    """Declare a field of ``Args`` as an argument of the command line.

    Args:
        flags: names of an option; without, the argument is positional and has the field's name.
        options: see ``ArgumentParser.add_argument``.
    """
    return field(metadata={"flags": flags, "options": options})


def declare(kind: type, parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of a command, in the order of the fields of its ``Args``."""
    for declared in fields(kind):
        flags, options = declared.metadata["flags"], declared.metadata["options"]
        if flags:
            parser.add_argument(*flags, dest=declared.name, **options)
        else:
            parser.add_argument(declared.name, **options)


def args_from(kind: type[A], namespace: argparse.Namespace) -> A:
    """Build a command's typed arguments from what argparse parsed."""
    declared = fields(cast(Any, kind))
    return kind(**{field.name: getattr(namespace, field.name) for field in declared})


def action_option(actions: Sequence[str]) -> Any:
    """Declare what to do, as the first argument; without one the command does the first of them."""
    *others, last = actions
    return arg(
        nargs="?",
        default=actions[0],
        choices=actions,
        metavar="ACTION",
        help=f"{', '.join(others)} or {last} (default: {actions[0]})",
    )


def json_flag() -> Any:
    """Declare ``--json``."""
    return arg("--json", action="store_true", help="print one JSON document to stdout")


def chat_key_option() -> Any:
    """Declare ``--chat-key``."""
    return arg(
        "--chat-key",
        metavar="K",
        default=DEFAULT_CHAT_KEY,
        type=chat_key,
        help="chat to work in (default: %(default)s)",
    )


def user_id_option() -> Any:
    """Declare ``--user-id``."""
    return arg(
        "--user-id",
        metavar="U",
        help="platform id of the user on whose behalf methods run (default: no user)",
    )


def supervisor_fd_option() -> Any:
    """Declare ``--supervisor-fd``, which only parent commands pass to the processes that they start."""
    return arg("--supervisor-fd", type=int, help=argparse.SUPPRESS)


def warn_of_root(output: Output) -> None:
    """Warn when this process runs as root: plugins would run as root too."""
    if os.geteuid() == 0:
        output.words("warning: workers started by root run plugins as root; use a dedicated user")


def whole_number(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 0."""
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def positive_number(text: str) -> float:
    """Parse a finite number of more than 0; the help of the option names the unit."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def port_number(text: str) -> int:
    """Parse a TCP port."""
    value = whole_number(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port (1 to 65535)")
    return value


def port_or_any(text: str) -> int:
    """Parse a TCP port, or 0."""
    return 0 if whole_number(text) == 0 else port_number(text)


def chat_key(text: str) -> str:
    """Parse a chat key: any text that is not blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a chat key is not empty")
    return text


def not_blank(text: str) -> str:
    """Parse a text that is not blank, such as the beginning of an id: all ids begin with the empty text."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it must not be blank")
    return text


def chosen_id(ids: Iterable[str], beginning: str, *, noun: str, listing: str) -> str:
    """Return the id that is, or begins with, a text.

    Args:
        noun: of what the ids are.
        listing: the command that lists them.

    Raises:
        NotFoundError: there is none.
        UsageError: there are several.
    """
    near = [one for one in ids if one.startswith(beginning)]
    if beginning in near:
        return beginning
    shown = one_line(beginning, limit=_ID_COLUMNS)
    if not near:
        raise NotFoundError(f"no {noun} has the id {shown}; `{listing}` lists them")
    if len(near) > 1:
        raise UsageError(f"several ids begin with {shown}; write more characters of the id")
    return near[0]


def read_text(path: Path) -> str:
    """Read a UTF-8 file, or stdin for ``-``.

    Raises:
        UsageError: it cannot be read or is not UTF-8; the message names it.
    """
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"cannot read {path}: it is not UTF-8 text ({exc.reason})") from exc
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or os.strerror(exc.errno or 0)}") from exc


def operator() -> str:
    """Return the identity of the shell's user, as decisions record it."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under an id without a name
        name = str(os.getuid())
    return f"shell:{name}"


def confirm(question: str, *, assumed: bool, deps: Deps) -> None:
    """Return if the person at the terminal agrees.

    Args:
        assumed: agreed by an option; nothing is asked.

    Raises:
        UsageError: the person does not agree, or there is no terminal to ask on.
    """
    if assumed:
        return
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on; read the call above, then add --yes")
    deps.output.words(f"{question} [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not approved; nothing was changed")
