"""`nekro command` over a gateway."""

from __future__ import annotations

from typing import cast

from nekro.cli.command import Deps
from nekro.cli.commands.command import Args, show_list, show_responses
from nekro.cli.remote.target import open_client
from nekro.cli.running import ExitCode
from nekro_agent.errors import UsageError
from nekro_client.models import Level

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
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
            level=cast(Level, args.level),
            timeout_seconds=args.timeout,
        )
    return show_responses([response.model_dump(mode="json") for response in result.responses], args, deps)
