"""`nekro timers`: list, pause, resume and delete the timers of chats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from nekro.cli.command import (
    Deps,
    action_option,
    arg,
    chat_key,
    chosen_id,
    json_flag,
    not_blank,
    positive_int,
)
from nekro.cli.gateway_client import newest, open_client
from nekro.cli.output import one_line
from nekro.cli.running import run_async
from nekro.cli.services.database import open_database
from nekro_agent.errors import UsageError

if TYPE_CHECKING:
    from nekro.operations.work import TimerRow

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "chosen",
    "run",
    "run_over_gateway",
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
        help="most timers that are read (default: %(default)s)",
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    settings = deps.load_settings()
    if args.action == "list":
        show_list([describe(timer) for timer in run_async(_list(args, settings))], args, deps)
        return 0
    show_changed(describe(run_async(_change(args, settings))), args, deps)
    return 0


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


async def _list(args: Args, settings: Settings) -> list[TimerRow]:
    from nekro.operations.work import timers_after

    async with open_database(settings) as database, database.read() as transaction:
        return await timers_after(transaction, args.chat_key, limit=args.limit)


async def _change(args: Args, settings: Settings) -> TimerRow:
    from nekro.operations.work import TimerChange, change_stored_timer, id_of, timers_after
    from storage.database_clock import follow_database_clock

    async with open_database(settings) as database:
        await follow_database_clock(database)  # the next due time is reckoned from it
        async with database.begin() as transaction:
            found = await timers_after(transaction, args.chat_key, limit=args.limit)
            timers = {id_of(timer): timer for timer in found}
            timer = timers[chosen(timers, args)]
            return await change_stored_timer(transaction, timer, TimerChange(args.action))


def chosen(ids: Iterable[str], args: Args) -> str:
    """Return the id that the arguments name by its beginning; as ``chosen_id``."""
    return chosen_id(ids, str(args.timer_id), noun="timer", listing="nekro timers")


def describe(timer: TimerRow) -> dict[str, Any]:
    """Return one timer as ``--json`` prints it."""
    from nekro.operations.work import timer_answer

    return timer_answer(timer).model_dump()


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


def run_over_gateway(args: Args, deps: Deps) -> int:
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
