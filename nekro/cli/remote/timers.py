"""`nekro timers` over a gateway."""

from __future__ import annotations

from nekro.cli.command import Deps
from nekro.cli.commands.timers import Args, check, chosen, show_changed, show_list
from nekro.cli.remote.target import newest, open_client

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        timers = newest(
            lambda cursor, limit: client.timers.list(chat_key=args.chat_key, cursor=cursor, limit=limit),
            limit=args.limit,
        )
        if args.action == "list":
            show_list([timer.model_dump() for timer in timers], args, deps)
            return 0
        timer_id = chosen([timer.id for timer in timers], args)
        actions = {
            "pause": client.timers.pause,
            "resume": client.timers.resume,
            "delete": client.timers.delete,
        }
        changed = actions[args.action](timer_id)
    show_changed(changed.model_dump(), args, deps)
    return 0
