"""`nekro timers`: list, pause, resume and delete the timers of chats."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import Settings
from cli.command import Deps, add_json, chat_key, positive_int
from cli.output import one_line
from cli.running import run_async
from cli.services.database import open_database
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.ports import CronJob

if TYPE_CHECKING:
    from storage.repositories.timers import RecordedTimer
    from storage.transaction import Transaction

    Timer = RecordedTimer | CronJob

__all__ = ["Args", "register", "run"]

_EPILOG = """\
examples:
  nekro timers
  nekro timers list --chat-key group_1 --json
  nekro timers pause 7f3a
  nekro timers resume 7f3a
  nekro timers delete 7f3a

One-time and recurring timers that have not ended. A paused timer does not fire; `resume` schedules a
recurring one for its next due time, and a one-time timer whose time has passed fires at once. An id may be
shortened to its beginning. `--json` prints a list of {id, kind, chat_key, state, fires_at, description,
temporary, schedule, timezone, workday_mode, title, last_fired_at}, else one such object; kind is once or
recurring, state waiting or paused, and fires_at is null while a recurring timer is paused.
"""
_ACTIONS: Final = ("list", "pause", "resume", "delete")
_TEXT_COLUMNS: Final = 60


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro timers`."""

    action: str
    timer_id: str | None
    chat_key: str | None
    limit: int
    json: bool


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=_ACTIONS,
        metavar="ACTION",
        help="list, pause, resume or delete (default: list)",
    )
    parser.add_argument(
        "timer_id", nargs="?", metavar="ID", help="timer, or the beginning of its id; for all but list"
    )
    parser.add_argument(
        "--chat-key", metavar="K", type=chat_key, default=None, help="only timers of this chat"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=positive_int,
        default=1000,
        help="most timers of each kind that are read (default: %(default)s)",
    )
    add_json(parser)


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    if (args.timer_id is None) != (args.action == "list"):
        raise UsageError("write `nekro timers list` or `nekro timers pause|resume|delete ID`")
    settings = deps.load_settings()
    if args.action == "list":
        _show(run_async(_list(args, settings)), args, deps)
        return 0
    timer = run_async(_change(args, settings))
    if args.json:
        deps.output.json(describe(timer))
    else:
        done = {"pause": "paused", "resume": "resumed", "delete": "deleted"}[args.action]
        deps.output.words(f"{done} timer {_id_of(timer)} of chat {timer.chat_key}")
    return 0


async def _list(args: Args, settings: Settings) -> list[Timer]:
    async with open_database(settings) as database, database.read() as transaction:
        return await _open_timers(transaction, args)


async def _change(args: Args, settings: Settings) -> Timer:
    from storage.database_clock import follow_database_clock

    async with open_database(settings) as database:
        await follow_database_clock(database)  # the next due time is reckoned from it
        async with database.begin() as transaction:
            timer = _chosen(await _open_timers(transaction, args), str(args.timer_id))
            if isinstance(timer, CronJob):
                return await _change_recurring(transaction, timer, args.action)
            return await _change_once(transaction, timer, args.action)


async def _change_once(transaction: Transaction, timer: RecordedTimer, action: str) -> RecordedTimer:
    if action == "delete":
        changed = await transaction.timers.delete(timer.id)
    else:
        changed = await transaction.timers.set_paused(timer.id, action == "pause")
    if not changed:
        raise NotFoundError(f"timer {timer.id} has fired meanwhile")
    return timer if action == "delete" else await transaction.timers.get_open(timer.id)


async def _change_recurring(transaction: Transaction, job: CronJob, action: str) -> CronJob:
    from nekro_agent import cron

    if action == "delete":
        changed, new = await transaction.cron_jobs.delete(job.job_id), job
    elif (action == "pause") == (job.next_fire_at is None):
        return job
    else:
        new = cron.scheduled(job, paused=action == "pause")
        changed = await transaction.cron_jobs.replace(new)
    if not changed:
        raise NotFoundError(f"timer {job.job_id} was deleted meanwhile")
    return new


async def _open_timers(transaction: Transaction, args: Args) -> list[Timer]:
    once = await transaction.timers.open_ones(args.chat_key, limit=args.limit)
    recurring = await transaction.cron_jobs.of_chat(args.chat_key)
    return [*once, *recurring[: args.limit]]


def _chosen(timers: Sequence[Timer], prefix: str) -> Timer:
    near = [timer for timer in timers if _id_of(timer).startswith(prefix)]
    exact = [timer for timer in near if _id_of(timer) == prefix] or near
    if not exact:
        raise NotFoundError(f"no timer has the id {prefix}; `nekro timers` lists them")
    if len(exact) > 1:
        raise UsageError(f"{len(exact)} ids begin with {prefix}; write more characters of the id")
    return exact[0]


def _id_of(timer: Timer) -> str:
    return timer.job_id if isinstance(timer, CronJob) else timer.id


def describe(timer: Timer) -> dict[str, Any]:
    """Return one timer as ``--json`` prints it."""
    if isinstance(timer, CronJob):
        return {
            "id": timer.job_id,
            "kind": "recurring",
            "chat_key": timer.chat_key,
            "state": "paused" if timer.next_fire_at is None else "waiting",
            "fires_at": timer.next_fire_at,
            "description": timer.event_desc,
            "temporary": False,
            "schedule": timer.cron_expr,
            "timezone": timer.timezone,
            "workday_mode": timer.workday_mode,
            "title": timer.title,
            "last_fired_at": timer.last_fired_at,
        }
    nothing = dict.fromkeys(("schedule", "timezone", "workday_mode", "title", "last_fired_at"))
    return {
        "id": timer.id,
        "kind": "once",
        "chat_key": timer.chat_key,
        "state": timer.state,
        "fires_at": timer.fire_at,
        "description": timer.description,
        "temporary": timer.temporary,
        **nothing,
    }


def _show(timers: Sequence[Timer], args: Args, deps: Deps) -> None:
    listed = [describe(timer) for timer in timers]
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
            one_line(timer["title"] or timer["description"], limit=_TEXT_COLUMNS),
        )
        for timer in listed
    ]
    deps.output.table(("ID", "CHAT", "STATE", "FIRES", "SCHEDULE", "WHAT"), rows)
