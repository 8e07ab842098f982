"""`nekro history` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.history import Args, show
from nekro.cli.remote.messages import describe_message
from nekro.cli.remote.target import newest, open_client
from nekro.cli.views.round_text import describe_round
from nekro_agent.errors import UsageError

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Print the chat.

    Raises:
        UsageError: the summary is asked for, which is in the database only.
    """
    if args.summary:
        raise UsageError("`--summary` reads the database; unset NEKRO_URL, and run it on a host of the fleet")
    with open_client() as client:
        chat = client.chat(args.chat_key)
        messages = newest(
            lambda cursor, limit: chat.messages(cursor=cursor, limit=limit, with_past=args.all),
            limit=args.limit,
        )
        rounds = (
            newest(lambda cursor, limit: chat.rounds(cursor=cursor, limit=limit), limit=args.limit)
            if args.trace
            else []
        )
    shown = [describe_message(message) for message in reversed(messages)]
    show(shown, [describe_round(entry) for entry in reversed(rounds)], args, deps)
    return 0
