"""`nekro timers`: list, pause, resume and delete the timers of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nekro.cli.api import all_of, find, open_api
from nekro.cli.command import (
    Deps,
    action_option,
    arg,
    chat_key,
    json_flag,
    not_blank,
    positive_int,
)
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro_agent.errors import UsageError

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "run",
    "show_changed",
    "show_list",
]


EPILOG: Final = """\
examples:
  nekro timers
  nekro timers list --chat-key group_1 --json
  nekro timers pause 7f3a
  nekro timers resume 7f3a
  nekro timers delete 7f3a

One-time and recurring timers that have not ended. A paused timer does not fire; `resume` schedules a
recurring one for its next due time, and a one-time timer whose time has passed fires at once. An id may be
shortened to its beginning. A timer that calls a function of a plugin is in the memory of a worker, its OWNER:
only the plugin can change it. `--json` prints a list of {id, kind, chat_key, state, fires_at, description,
temporary, schedule, timezone, workday_mode, title, last_fired_at, owner, plugin}, else one such object; kind
is once or recurring, state waiting or paused, fires_at is null while a recurring timer is paused, and owner
and plugin are null for all timers but those with a function.
"""

_ACTIONS: Final = ("list", "pause", "resume", "delete")

_TEXT_COLUMNS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro timers`."""

    action: str = action_option(_ACTIONS)
    timer_id: str | None = arg(
        nargs="?", metavar="ID", type=not_blank, help="timer, or the beginning of its id; for all but list"
    )
    chat_key: str | None = arg("--chat-key", metavar="K", type=chat_key, help="only timers of this chat")
    limit: int = arg(
        "--limit",
        metavar="N",
        type=positive_int,
        default=1000,
        help="list: most timers (default: %(default)s)",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    async with open_api(deps, asks_up=True) as api:
        page = partial(api.timers.list, chat_key=args.chat_key)
        if args.action == "list":
            found = await all_of(page, limit=args.limit)
            show_list([timer.model_dump() for timer in found], args, deps)
            return
        timer_id = await find(page, str(args.timer_id), noun="timer", listing="nekro timers")
        actions = {"pause": api.timers.pause, "resume": api.timers.resume, "delete": api.timers.delete}
        show_changed((await actions[args.action](timer_id)).model_dump(), args, deps)


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if (args.timer_id is None) != (args.action == "list"):
        raise UsageError("write `nekro timers list` or `nekro timers pause|resume|delete ID`")


def show_changed(timer: Mapping[str, Any], args: Args, deps: Deps) -> None:
    """Print a timer, as ``describe`` returns it, that was paused, resumed or deleted."""
    if args.json:
        deps.output.json(timer)
    else:
        done = {"pause": "paused", "resume": "resumed", "delete": "deleted"}[args.action]
        deps.output.words(f"{done} timer {timer['id']} of chat {timer['chat_key']}")


def show_list(listed: Sequence[Mapping[str, Any]], args: Args, deps: Deps) -> None:
    """Print timers as ``describe`` returns them, the next one first."""
    listed = sorted(
        listed, key=lambda one: (one["fires_at"] is None, one["fires_at"], one["kind"], one["id"])
    )
    if args.json:
        deps.output.json(listed)
        return
    rows = [
        (
            timer["id"],
            timer["chat_key"],
            timer["state"],
            f"{timer['fires_at']:%Y-%m-%d %H:%M:%S} UTC" if timer["fires_at"] else "",
            f"{timer['schedule']} {timer['timezone']}" if timer["schedule"] else "once",
            f"{timer['owner']} ({timer['plugin']})" if timer["owner"] else "",
            one_line(timer["title"] or timer["description"], limit=_TEXT_COLUMNS),
        )
        for timer in listed
    ]
    deps.output.table(("ID", "CHAT", "STATE", "FIRES", "SCHEDULE", "OWNER", "WHAT"), rows)
