"""`nekro command`: run a plugin command, as users write it in a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_number, user_id_option
from nekro.cli.gateway_client import open_client
from nekro.cli.output import PartialError, one_line
from nekro.cli.running import ExitCode, run_async
from nekro.cli.services.presence import awaited_with_workers
from nekro.cli.services.system import CALL_LANES, open_services
from nekro.cli.views.catalogue import load_catalogue, say_what_is_listed
from nekro_agent.errors import MethodFailedError, UsageError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
    from nekro_client.models import Level

__all__ = [
    "EPILOG",
    "Args",
    "run",
    "run_over_gateway",
    "show_list",
    "show_responses",
]


EPILOG: Final = """\
examples:
  nekro command
  nekro command group_1 '/weather Tokyo days:3'
  nekro command group_1 '/Ada.weather:forecast Tokyo' --user-id ada --as user --json
  nekro command group_1 yes

Without arguments it lists the commands. A line that does not begin with / answers the last command that
asked a question in this chat and of this user. Arguments: words in order, `name:value`, `name:"two words"`.

The command runs on a worker with the permissions of --as; over NEKRO_URL the key needs the scope `call`, and
`admin` for advanced and super_user. `--json` prints {status, responses}; status is
success, error (exit code 6; then with the key `error`) or waiting (for an answer); each response has
{status, message, data, output_segments, callback_cmd, wait_options, wait_timeout}.
"""

_LEVELS = ("public", "user", "advanced", "super_user")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro command`."""

    chat_key: str | None = arg(nargs="?", metavar="K", type=chat_key, help="chat")
    line: str | None = arg(nargs="?", metavar="LINE", help="`/name arguments`, or an answer")
    user_id: str | None = user_id_option()
    level: str = arg(
        "--as",
        choices=_LEVELS,
        default="super_user",
        help="permission level of the user (default: %(default)s)",
    )
    timeout: float | None = arg(
        "--timeout",
        metavar="SECONDS",
        type=positive_number,
        help="longest wait (default: the limit of calls)",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run a command line, or list the commands."""
    if args.chat_key is None:
        return _list(args, deps)
    if args.line is None or not args.line.strip():
        raise UsageError("the command line is missing; write `nekro command K '/name arguments'`")
    responses = run_async(_send(args.chat_key, args.line, args, deps))
    return show_responses([response.model_dump(mode="json") for response in responses], args, deps)


def show_responses(responses: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> int:
    """Print the responses of a command; returns the exit code.

    Raises:
        PartialError: the command failed, and --json is given.
    """
    status, message = responses[-1]["status"], responses[-1].get("message") or ""
    if not args.json:
        _print(responses, args.chat_key or "", deps)
        return ExitCode.METHOD if status == "error" else ExitCode.OK
    described = {"status": status, "responses": [_described(response) for response in responses]}
    if status == "error":
        raise PartialError(MethodFailedError("CommandFailed", message), described)
    deps.output.json(described)
    return ExitCode.OK


async def _send(chat: str, line: str, args: Args, deps: Deps) -> list[CommandResponse]:
    from nekro.app import use_cases

    settings = deps.load_settings()
    async with open_services(settings, command="command", lanes=CALL_LANES, output=deps.output) as opened:
        services = opened[1]
        work = use_cases.run_command(services, line, who=_context(chat, args), timeout_seconds=args.timeout)
        return await awaited_with_workers(work, lambda: services.app, lane=Lane.METHODS.value)


def _context(chat: str, args: Args) -> CommandExecutionContext:
    from nekro_agent.commands.schemas import CommandExecutionContext

    user = args.user_id or ""
    return CommandExecutionContext(
        user_id=user,
        username=user,
        chat_key=chat,
        is_super_user=args.level == "super_user",
        is_advanced_user=args.level in ("super_user", "advanced"),
    )


def _described(response: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if value not in (None, "")}


def _print(responses: Sequence[Mapping[str, Any]], chat: str, deps: Deps) -> None:
    for response in responses:
        is_error = response["status"] == "error"
        for text in _texts(response):
            (deps.output.words if is_error else deps.output.data)(text)
    last = responses[-1]
    if last["status"] == "waiting":
        options = f" ({', '.join(last['wait_options'])})" if last.get("wait_options") else ""
        limit = f" within {last['wait_timeout']:g} s" if last.get("wait_timeout") else ""
        deps.output.words(f"answer{limit}{options}: nekro command {chat} 'TEXT'")


def _texts(response: Mapping[str, Any]) -> list[str]:
    texts = [response["message"]] if response.get("message") else []
    for segment in response.get("output_segments") or ():
        stored = segment.get("file_path") or (segment.get("file") or {}).get("path")
        where = stored or segment.get("web_url") or segment.get("file_name")
        texts.append(f"[{segment['type']} {where}]" if where else segment["text"])
    return texts


def _list(args: Args, deps: Deps) -> int:
    from nekro.app.catalogue import listed_commands

    catalogue = load_catalogue(deps.load_settings())
    listed = [
        {
            "name": entry.name,
            "full_name": entry.full_name,
            "aliases": list(entry.aliases),
            "permission": entry.permission,
            "usage": entry.usage,
            "description": entry.description,
        }
        for entry in listed_commands(catalogue.registry)
    ]
    show_list(listed, args, deps)
    say_what_is_listed(catalogue, deps.output)
    return ExitCode.OK


def show_list(listed: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print commands as objects of name, full_name, aliases, permission, usage and description."""
    if args.json:
        deps.output.json(listed)
    else:
        rows = [
            (f"/{c['name']}", c["permission"], one_line(str(c["usage"] or c["description"])), c["full_name"])
            for c in listed
        ]
        deps.output.table(("COMMAND", "PERMISSION", "USAGE", "FULL NAME"), rows)


def run_over_gateway(args: Args, deps: Deps) -> int:
    """Run a command line, or list the commands."""
    with open_client() as client:
        if args.chat_key is None:
            show_list([command.model_dump(mode="json") for command in client.commands()], args, deps)
            return ExitCode.OK
        if args.line is None or not args.line.strip():
            raise UsageError("the command line is missing; write `nekro command K '/name arguments'`")
        result = client.command(
            args.chat_key,
            args.line,
            user_id=args.user_id,
            level=cast("Level", args.level),
            timeout_seconds=args.timeout,
        )
    return show_responses([response.model_dump(mode="json") for response in result.responses], args, deps)
