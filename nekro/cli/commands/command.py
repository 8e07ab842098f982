"""`nekro command`: run a plugin command, as users write it in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from nekro.cli.api import SystemNeed, open_api
from nekro.cli.command import Deps, arg, chat_key, json_flag, positive_number, user_id_option
from nekro.cli.output import PartialError, one_line
from nekro.cli.running import ExitCode, run_async
from nekro.cli.views.catalogue import CatalogueServices, say_what_is_listed
from nekro_agent.errors import MethodFailedError, UsageError

if TYPE_CHECKING:
    from nekro_client.models import CommandResponse, CommandResult, Level

__all__ = ["EPILOG", "Args", "run"]

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
{status, message, data, output_segments, wait_options, wait_timeout}, without those that are empty.
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
        run_async(_list(args, deps))
        return ExitCode.OK
    if args.line is None or not args.line.strip():
        raise UsageError("the command line is missing; write `nekro command K '/name arguments'`")
    return _show(run_async(_send(args.chat_key, args.line, args, deps)), args, deps)


async def _send(chat: str, line: str, args: Args, deps: Deps) -> CommandResult:
    from nekro.cli.services.system import CALL_LANES

    need = SystemNeed(command="command", lanes=CALL_LANES, needs_workers=True)
    async with open_api(deps, system=need) as api:
        return await api.command(
            chat_key=chat,
            line=line,
            user_id=args.user_id,
            level=cast("Level", args.level),
            timeout_seconds=args.timeout,
        )


def _show(result: CommandResult, args: Args, deps: Deps) -> int:
    """Print the responses of a command; returns the exit code.

    Raises:
        PartialError: the command failed, and --json is given.
    """
    last = result.responses[-1]
    if not args.json:
        _print(result.responses, args.chat_key or "", deps)
        return ExitCode.METHOD if last.status == "error" else ExitCode.OK
    described = {"status": last.status, "responses": [_described(one) for one in result.responses]}
    if last.status == "error":
        raise PartialError(MethodFailedError("CommandFailed", last.message), described)
    deps.output.json(described)
    return ExitCode.OK


def _described(response: CommandResponse) -> dict[str, Any]:
    return {
        name: value for name, value in response.model_dump(mode="json").items() if value not in (None, "")
    }


def _print(responses: Sequence[CommandResponse], chat: str, deps: Deps) -> None:
    for response in responses:
        for text in _texts(response):
            (deps.output.words if response.status == "error" else deps.output.data)(text)
    last = responses[-1]
    if last.status == "waiting":
        options = f" ({', '.join(last.wait_options)})" if last.wait_options else ""
        limit = f" within {last.wait_timeout:g} s" if last.wait_timeout else ""
        deps.output.words(f"answer{limit}{options}: nekro command {chat} 'TEXT'")


def _texts(response: CommandResponse) -> list[str]:
    texts = [response.message] if response.message else []
    for part in response.output_segments or ():
        where = (part.file and part.file.path) or part.web_url or part.file_name
        texts.append(f"[{part.type} {where}]" if where else part.text)
    return texts


async def _list(args: Args, deps: Deps) -> None:
    async with open_api(deps, services=CatalogueServices) as api:
        commands = await api.commands()
        if args.json:
            deps.output.json([command.model_dump() for command in commands])
        else:
            rows = [
                (f"/{one.name}", one.permission, one_line(one.usage or one.description), one.full_name)
                for one in commands
            ]
            deps.output.table(("COMMAND", "PERMISSION", "USAGE", "FULL NAME"), rows)
        await say_what_is_listed(api, deps.output)
