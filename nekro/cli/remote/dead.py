"""`nekro dead` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.dead import Args, check, chosen, show_list, show_one
from nekro.cli.remote.target import newest, open_client

__all__ = ["run"]

_CHECKED = {"signature", "chat_key", "deadline"}


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        letters = client.dead_letters
        found = newest(lambda cursor, limit: letters.list(cursor=cursor, limit=limit), limit=args.limit)
        if args.action == "list":
            show_list([item.model_dump(exclude=_CHECKED) for item in found], args, deps)
            return 0
        for letter_id in sorted(chosen([item.id for item in found], args)):
            if args.action == "show":
                shown = letters.get(letter_id)
                deadline = shown.deadline and shown.deadline.isoformat()
                show_one(shown.model_dump() | {"deadline": deadline}, args, deps)
            elif args.action == "drop":
                letters.drop(letter_id)
                deps.output.words(f"dropped {letter_id}")
            else:
                sent = letters.retry(letter_id, timeout_seconds=args.timeout)
                deps.output.words(f"sent {letter_id} to lane {sent.lane} again")
    return 0
