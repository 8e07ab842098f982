"""Entry point of `nekro`: parse, run one command, turn an error into one line and an exit code."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from nekro.app.extensions import installed

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.cli.command import CommandModule, Deps
    from nekro.cli.output import Output

__all__ = ["ANYWHERE", "COMMANDS", "GARBAGE_THRESHOLD", "CliCommand", "build_parser", "main"]


@dataclass(frozen=True, kw_only=True)
class CliCommand:
    """One command of `nekro`; its module is imported only when the command is used, which keeps help fast."""

    name: str
    summary: str
    #: Whether ``EXEC_CODES`` replace some exit codes (see ``nekro.cli.running``): only for `exec`.
    own_codes: bool = False
    #: The extension that brings it, and its module there; "": it is of the core.
    extension: str = ""
    path: str = ""

    @property
    def works_over_api(self) -> bool:
        """Whether it asks the API, here or over a gateway (``nekro.cli.api``)."""
        return self.name in OVER_API or bool(self.extension)

    @property
    def module(self) -> CommandModule:
        """The module that declares and runs the command."""
        return cast("CommandModule", importlib.import_module(self.path or f"nekro.cli.commands.{self.name}"))

    def runner(self, data_dir: Path | None) -> Callable[[Any, Deps], int]:
        """Return what runs the command: here, or over the gateway that ``NEKRO_URL`` names.

        A command that asks the API works over a gateway.

        Args:
            data_dir: as ``--data-dir``.

        Raises:
            UsageError: ``NEKRO_URL`` is set, and the command works on its own host only.
        """
        url = os.environ.get("NEKRO_URL")
        if not url or self.name in ANYWHERE:
            return self._run_if_loaded if self.extension else self.module.run
        if not self.works_over_api:
            from nekro_agent.errors import UsageError

            raise UsageError(
                f"`nekro {self.name}` works on this host only, and NEKRO_URL names the gateway {url}; "
                "unset NEKRO_URL to run it here"
            )
        if data_dir is not None:
            os.environ["NEKRO_DATA_DIR"] = str(data_dir)  # where the client finds the key of a gateway here
        return self.module.run

    def _run_if_loaded(self, args: Any, deps: Deps) -> int:
        if not deps.load_settings().loads_extension(self.extension):
            from nekro_agent.errors import UsageError

            raise UsageError(
                f"`nekro {self.name}` is of the extension {self.extension}, which NEKRO_EXTENSIONS leaves out"
            )
        return self.module.run(args, deps)


def _with_extensions(commands: Sequence[CliCommand]) -> tuple[CliCommand, ...]:
    """Return the commands with those of the installed extensions among them."""
    found = list(commands)
    for extension in installed():
        for one in extension.commands:
            at = next(i for i, command in enumerate(found) if command.name == one.after)
            command = CliCommand(
                name=one.name, summary=one.summary, extension=extension.name, path=one.module
            )
            found.insert(at + 1, command)
    return tuple(found)


_COMMANDS: Final = (
    CliCommand(name="demo", summary="run a scripted tour on services of its own and check its results"),
    CliCommand(name="up", summary="run everything on this machine, in the foreground"),
    CliCommand(name="worker", summary="run one worker process, on any host"),
    CliCommand(name="gateway", summary="serve the HTTP API"),
    CliCommand(name="keys", summary="create, list and revoke keys of the HTTP API"),
    CliCommand(
        name="exec",
        summary="run a file in the sandbox, as code of the LLM runs",
        own_codes=True,
    ),
    CliCommand(name="call", summary="call one plugin method through the queue"),
    CliCommand(name="command", summary="run a command of a plugin, or answer one; list them"),
    CliCommand(name="chat", summary="talk to the agent"),
    CliCommand(name="send", summary="send one message into a chat, as a user"),
    CliCommand(name="history", summary="show the messages and the rounds of a chat"),
    CliCommand(name="tail", summary="show the events of a chat as they happen"),
    CliCommand(name="trace", summary="show one turn: rounds, model, code, calls, output"),
    CliCommand(name="replay", summary="run the programs of a turn again, or ask another model; save a case"),
    CliCommand(name="eval", summary="run saved cases, and show where their programs differ"),
    CliCommand(name="cancel", summary="stop what the agent is doing in a chat"),
    CliCommand(name="reset", summary="reset a chat: start a new history, run the plugins' reset hooks"),
    CliCommand(
        name="jobs",
        summary="list, watch and cancel background jobs, downloads and detached calls",
    ),
    CliCommand(name="approvals", summary="list calls that wait for approval, and decide on them"),
    CliCommand(name="files", summary="list, get and put the files of a chat; check the store of files"),
    CliCommand(name="timers", summary="list, pause, resume and delete timers"),
    CliCommand(name="methods", summary="list the methods that code may call"),
    CliCommand(name="plugins", summary="list plugins and their errors; create a new one; purge data"),
    CliCommand(name="models", summary="list and test model groups; choose that of a chat; write its summary"),
    CliCommand(name="costs", summary="show what was spent, and what is left of budgets"),
    CliCommand(name="sandbox", summary="list, build, add and remove the packages that sandboxes can import"),
    CliCommand(name="doctor", summary="check settings, Redis, database, sandbox and plugins"),
    CliCommand(name="dead", summary="list, show, retry or drop dead letters"),
    CliCommand(name="db", summary="migrate the database"),
    CliCommand(name="flower", summary="watch tasks and workers in a browser"),
    CliCommand(name="metrics", summary="show the metrics of the fleet, or serve them to Prometheus"),
    CliCommand(name="completion", summary="print the script that completes `nekro` in a shell"),
    CliCommand(name="bench", summary="measure the call path in comparison with other systems"),
)

#: All commands, in the order of the help.
COMMANDS: Final = _with_extensions(_COMMANDS)
#: Commands that need no system.
ANYWHERE: Final = frozenset({"completion", "eval"})
#: Commands that ask the API (``nekro.cli.api``), here or over a gateway.
OVER_API: Final = frozenset(
    {
        "approvals",
        "call",
        "cancel",
        "chat",
        "command",
        "costs",
        "dead",
        "doctor",
        "exec",
        "files",
        "history",
        "jobs",
        "keys",
        "methods",
        "plugins",
        "reset",
        "send",
        "tail",
        "timers",
        "trace",
    }
)

#: Allocations that trigger a garbage collection in a command; a worker sets its own.
GARBAGE_THRESHOLD: Final = 50_000

_EPILOG = """\
Settings are environment variables NEKRO_… or lines of ./.env; `nekro doctor --settings` lists them.
With NEKRO_URL and NEKRO_KEY commands work over the gateway of a fleet. Without NEKRO_KEY they use the local
key, secrets/api.key of the data directory, for a gateway on this host.

Exit codes: 0 done; 1 a check failed, or an internal error; 2 command line or setting wrong; 3 broker;
4 database; 5 a plugin failed to load; 6 a method call or a job failed; 7 no sandbox; 12 no language model,
or a turn failed; 13 a process did not start; 130 Ctrl-C. `nekro exec` returns the stop type of the run.
"""


class WrongUsage(Exception):
    """The command line is wrong; raised by ``LazyParser`` and reported by ``main``."""

    def __init__(self, message: str, *, command: CliCommand | None, hint: str = "") -> None:
        super().__init__(message)
        self.command = command
        self.hint = hint


class LazyParser(argparse.ArgumentParser):
    """A parser that imports its command's module when it parses, and raises ``WrongUsage``."""

    command: CliCommand | None = None
    _registered = False

    def declare(self) -> None:
        """Make the command's module add its arguments, once."""
        if self.command is not None and not self._registered:
            self._registered = True
            from nekro.cli.command import declare

            module = self.command.module
            self.epilog = module.EPILOG
            declare(module.Args, self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Declare the command's arguments, then parse."""
        self.declare()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the error with a pointer to the help."""
        raise WrongUsage(message, command=self.command, hint=f"`{self.prog} --help` shows the usage.")


class _PrintVersion(argparse.Action):
    """As argparse's own action, but the version is read only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        help_text = "show program's version number and exit"
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help_text
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from nekro.base.release import release

        sys.stdout.write(f"nekro-workers {release()}\n")
        parser.exit()


def build_parser() -> LazyParser:
    """Return the parser of the whole command line; commands are not imported yet."""
    parser = LazyParser(
        prog="nekro",
        description="Run Nekro Agent plugins on workers, called by code in a sandbox.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_PrintVersion)
    _add_global_options(parser, default=None)
    # Not `required`: a bare `nekro` prints the help instead of an error.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LazyParser)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.command = command
        _add_global_options(sub, default=argparse.SUPPRESS)
        sub.set_defaults(entry=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Imports make many objects that stay; scanning them again and again takes a fifth of a short command.
    gc.set_threshold(GARBAGE_THRESHOLD)
    # httpx's own command line, which imports click, rich and pygments, a third of its imports: not found.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    try:
        return _main(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:
        from nekro.cli.output import Output
        from nekro.cli.running import ExitCode

        Output().abandon_stdout()
        return ExitCode.BROKEN_PIPE


def _main(arguments: Sequence[str]) -> int:
    """Parse and run; every error becomes one line, with ``--json`` also an object, and an exit code."""
    parser = build_parser()
    entry: CliCommand | None = None
    output: Output | None = None
    try:
        namespace = _parse(parser, arguments)
        entry = getattr(namespace, "entry", None)
        if entry is None:
            parser.print_help(sys.stderr)
            return _usage_code(None)
        output = _output(debug=bool(namespace.debug), json_errors=getattr(namespace, "json", False))
        return _run(entry, namespace, output)
    except (BrokenPipeError, SystemExit, GeneratorExit):
        raise
    except BaseException as exc:
        # The edge of the process. Without parsed arguments, only their text says what to print.
        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        output = output or _output(debug="--debug" in options, json_errors="--json" in options)
        return _refuse(exc, output) if isinstance(exc, WrongUsage) else _report(exc, entry, output)


def _output(*, debug: bool, json_errors: bool) -> Output:
    # Imported here, so that the help is fast.
    from nekro.cli.output import Output

    return Output(debug=debug, json_errors=json_errors)


def _refuse(wrong: WrongUsage, output: Output) -> int:
    from nekro_agent.errors import UsageError

    output.error(UsageError(str(wrong)))
    if wrong.hint:
        output.words(wrong.hint)
    return _usage_code(wrong.command)


def _parse(parser: LazyParser, arguments: Sequence[str]) -> argparse.Namespace:
    namespace: argparse.Namespace
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = getattr(namespace, "entry", None)
        usage = parser.prog if command is None else f"{parser.prog} {command.name}"
        raise WrongUsage(
            f"unrecognized arguments: {' '.join(unknown)}",
            command=command,
            hint=f"`{usage} --help` shows the usage.",
        )
    return namespace


def _run(entry: CliCommand, namespace: argparse.Namespace, output: Output) -> int:
    from nekro.cli.command import Deps, args_from
    from nekro.cli.running import configure_logs

    configure_logs(debug=output.debug)
    load_settings = functools.cache(lambda: _load_settings(namespace.data_dir))
    deps = Deps(output=output, data_dir=namespace.data_dir, load_settings=load_settings)
    module = entry.module
    return entry.runner(namespace.data_dir)(args_from(module.Args, namespace), deps)


def _report(error: BaseException, entry: CliCommand | None, output: Output) -> int:
    from nekro.cli.output import PartialError
    from nekro.cli.running import EXEC_CODES, exit_code_of

    partial = error if isinstance(error, PartialError) else None
    error, result = (error, {}) if partial is None else (partial.error, partial.result)
    output.error(error, result=result)
    code = exit_code_of(error)
    return EXEC_CODES.get(code, code) if entry is not None and entry.own_codes else code


def _load_settings(data_dir: Path | None) -> Settings:
    from broker_config.settings import Settings

    return Settings.load(**({} if data_dir is None else {"data_dir": data_dir}))


def _add_global_options(parser: argparse.ArgumentParser, *, default: Any) -> None:
    """Declare the options of every command, accepted before or after its name."""
    group = parser.add_argument_group("global options")
    group.add_argument(
        "--data-dir",
        metavar="DIR",
        type=Path,
        default=default,
        help="root of everything kept on disk (env NEKRO_DATA_DIR, default ./data)",
    )
    group.add_argument(
        "--debug",
        action="store_true",
        default=default,
        help="show tracebacks and the logs of this process",
    )


def _usage_code(command: CliCommand | None) -> int:
    from nekro.cli.running import EXEC_CODES, ExitCode

    own = command is not None and command.own_codes
    return EXEC_CODES[ExitCode.USAGE] if own else ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
