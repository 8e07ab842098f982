"""`nekro history` over a gateway."""

from __future__ import annotations

from cli.command import Deps
from cli.commands.history import Args, show
from cli.remote.messages import describe_message, describe_round
from cli.remote.target import newest, open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Print the chat."""
    with open_client() as client:
        chat = client.chat(args.chat_key)
        messages = newest(
            lambda cursor, limit: chat.messages(cursor=cursor, limit=limit, with_past=args.all),
            limit=args.limit,
        )
        messages.reverse()
        # In the order of their first messages.
        ids = dict.fromkeys(message.turn_id for message in messages if message.turn_id)
        turns = [client.turns.get(turn_id) for turn_id in ids] if args.trace else []
    rounds = [describe_round(entry, turn) for turn in turns for entry in turn.rounds]
    show([describe_message(message) for message in messages], rounds[-args.limit :], args, deps)
    return 0
