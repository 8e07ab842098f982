"""`nekro jobs`: list, show, watch, cancel and retry jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nekro.cli.api import all_of, find, open_api
from nekro.cli.command import Deps, action_option, arg, chat_key, json_flag, not_blank, positive_int
from nekro.cli.output import PartialError, one_line
from nekro.cli.running import run_async
from nekro.cli.views.job_bars import job_view, state_of
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import MethodFailedError, UsageError

if TYPE_CHECKING:
    from nekro_client import AsyncClient
    from nekro_client.models import Job, JobLog, JobLogEntry

__all__ = [
    "EPILOG",
    "Args",
    "check",
    "run",
    "show_cancelled",
    "show_list",
    "show_log",
    "show_one",
    "show_retried",
    "watch",
]


EPILOG: Final = """\
examples:
  nekro jobs
  nekro jobs list --open --chat-key group_1 --json
  nekro jobs watch
  nekro jobs watch 6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11
  nekro jobs show 6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11 --json
  nekro jobs log 6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11
  nekro jobs cancel 6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11
  nekro jobs retry 6f1c9a0e5d0b4b6f9a7c2f4f7f3b8a11

Background jobs of plugins, calls that report their progress, and calls that outlived the code that made
them. `watch` draws bars with rate and time left until the job has ended (without an id: all open jobs).
`--json` prints a list of {id, type, plugin, chat_key, state, percent, message, started_at, updated_at};
`show --json` one such object with {task_id, attempt, worker, created_at, finished_at, data} added.
`log` prints the attempts at a job, its reports and what its code logged; `--json` as {attempts, entries}.
`retry` starts a job that failed or was cancelled again, as a new job with the same arguments.
`watch` ends with exit code 6 when a job that it watched has failed; `--json` then prints {jobs, error}.
"""

_ACTIONS: Final = ("list", "show", "watch", "log", "cancel", "retry")

_MESSAGE_COLUMNS: Final = 60

_LOG_COLUMNS: Final = 200


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro jobs`."""

    action: str = action_option(_ACTIONS)
    job_id: str | None = arg(
        nargs="?",
        metavar="ID",
        type=not_blank,
        help="job, or the beginning of its id; for all actions but list",
    )
    chat_key: str | None = arg("--chat-key", metavar="K", type=chat_key, help="only jobs of this chat")
    open: bool = arg("--open", action="store_true", help="only jobs that have not ended")
    limit: int = arg(
        "--limit", metavar="N", type=positive_int, default=50, help="newest jobs shown (default: %(default)s)"
    )
    json: bool = json_flag()


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    run_async(_run(args, deps))
    return 0


async def _run(args: Args, deps: Deps) -> None:
    async with open_api(deps, asks_up=True) as api:
        if args.action == "list":
            show_list(await _newest(api, args, open_only=args.open), args, deps)
            return
        if args.job_id is None:
            await watch(await _newest(api, args, open_only=True), api.jobs.get, args, deps)
            return
        job_id = await find(api.jobs.list, args.job_id, noun="job", listing="nekro jobs")
        if args.action == "show":
            show_one(await api.jobs.get(job_id), args, deps)
        elif args.action == "log":
            show_log(await api.jobs.log(job_id), args, deps)
        elif args.action == "retry":
            show_retried(await api.jobs.retry(job_id), args, deps)
        elif args.action == "cancel":
            show_cancelled(await api.jobs.cancel(job_id), args, deps)
        else:
            await watch([await api.jobs.get(job_id)], api.jobs.get, args, deps)


async def _newest(api: AsyncClient, args: Args, *, open_only: bool) -> list[Job]:
    page = partial(api.jobs.list, chat_key=args.chat_key, open_only=open_only)
    return await all_of(page, limit=args.limit)


def check(args: Args) -> None:
    """Return if the arguments fit together.

    Raises:
        UsageError: they do not.
    """
    if args.action in ("show", "log", "cancel", "retry") and args.job_id is None:
        raise UsageError(f"name the job, as in `nekro jobs {args.action} ID`; `nekro jobs` lists them")
    if args.action == "list" and args.job_id is not None:
        raise UsageError("`nekro jobs list` takes no id; `nekro jobs show ID` shows one job")


def show_list(jobs: Sequence[Job], args: Args, deps: Deps) -> None:
    """Print jobs."""
    if args.json:
        deps.output.json([describe(job) for job in jobs])
        return
    rows = [
        (
            job.id,
            job.type,
            job.plugin,
            job.chat_key,
            state_of(job),
            f"{job.percent}%",
            one_line(job.message, limit=_MESSAGE_COLUMNS),
        )
        for job in jobs
    ]
    deps.output.table(("ID", "TYPE", "PLUGIN", "CHAT", "STATE", "DONE", "MESSAGE"), rows)


def show_one(job: Job, args: Args, deps: Deps) -> None:
    """Print everything that is known of a job."""
    whole = describe(job) | {
        "task_id": job.task_id,
        "attempt": job.attempt,
        "worker": job.worker,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "data": job.data,
    }
    if args.json:
        deps.output.json(whole)
        return
    deps.output.table(
        ("FIELD", "VALUE"), [(name, value) for name, value in whole.items() if value is not None]
    )


async def watch(jobs: Sequence[Job], read: Callable[[str], Awaitable[Job]], args: Args, deps: Deps) -> None:
    """Show jobs until all have ended; ``read`` returns the present state of one.

    Raises:
        PartialError: one of them has failed.
    """
    if not jobs:
        deps.output.words("no job is open; `nekro jobs` lists the ended ones")
    elif not args.json:
        with job_view(deps.output) as view:
            while True:
                view.show(jobs)
                if all(job.finished_at is not None for job in jobs):
                    break
                await asyncio.sleep(REFRESH_SECONDS)
                jobs = [await read(job.id) for job in jobs]
    else:
        while not all(job.finished_at is not None for job in jobs):
            await asyncio.sleep(REFRESH_SECONDS)
            jobs = [await read(job.id) for job in jobs]
    failed = [job for job in jobs if job.state == "failed"]
    if args.json and not failed:
        deps.output.json([describe(job) for job in jobs])
    if failed:
        names = ", ".join(job.id for job in failed)
        error = MethodFailedError("JobFailed", f"job {names}: {failed[0].message}")
        raise PartialError(error, {"jobs": [describe(job) for job in jobs]})


def show_cancelled(job: Job, args: Args, deps: Deps) -> None:
    """Print the state of a job after the request to end it."""
    if args.json:
        deps.output.json(describe(job))
    elif job.finished_at is not None:
        deps.output.words(f"job {job.id} is {state_of(job)}")
    else:
        deps.output.words(f"requested to cancel job {job.id}; `nekro jobs watch {job.id}` shows its end")


def show_log(found: JobLog, args: Args, deps: Deps) -> None:
    """Print what happened to a job."""
    if args.json:
        deps.output.json(found.model_dump(mode="json"))
        return
    rows = [
        (
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.attempt,
            entry.level or entry.kind,
            one_line(_words(entry), limit=_LOG_COLUMNS),
        )
        for entry in found.entries
    ]
    deps.output.table(("TIME (UTC)", "ATTEMPT", "WHAT", "TEXT"), rows)


def _words(entry: JobLogEntry) -> str:
    if entry.percent is not None:
        return f"{entry.percent}% {entry.text}"
    return entry.worker or entry.text


def show_retried(job: Job, args: Args, deps: Deps) -> None:
    """Print the job that repeats another one."""
    if args.json:
        deps.output.json(describe(job))
    else:
        deps.output.words(f"started job {job.id}; `nekro jobs watch {job.id}` shows its end")


def describe(job: Job) -> dict[str, Any]:
    """Return one job as ``--json`` prints it."""
    return {
        "id": job.id,
        "type": job.type,
        "plugin": job.plugin,
        "chat_key": job.chat_key,
        "state": state_of(job),
        "percent": job.percent,
        "message": job.message,
        "started_at": job.started_at,
        "updated_at": job.updated_at,
    }
