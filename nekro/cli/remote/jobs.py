"""`nekro jobs` over a gateway."""

from __future__ import annotations

import asyncio
import dataclasses

from nekro.cli.command import Deps
from nekro.cli.commands.jobs import (
    Args,
    check,
    show_cancelled,
    show_list,
    show_log,
    show_one,
    show_retried,
    watch,
)
from nekro.cli.remote.target import newest, open_client
from nekro.cli.running import run_async
from nekro_client import Client, models
from storage.repositories.jobs import Job
from storage.states import JobState

__all__ = ["run"]


def run(args: Args, deps: Deps) -> int:
    """Run the action."""
    check(args)
    with open_client() as client:
        if args.action == "list":
            show_list(_newest(client, args, open_only=args.open), args, deps)
        elif args.action == "show":
            show_one(_job(client.jobs.get(str(args.job_id))), args, deps)
        elif args.action == "log":
            show_log(client.jobs.log(str(args.job_id)), args, deps)
        elif args.action == "retry":
            show_retried(_job(client.jobs.retry(str(args.job_id))), args, deps)
        elif args.action == "cancel":
            show_cancelled(_job(client.jobs.cancel(str(args.job_id))), args, deps)
        else:
            _watch(client, args, deps)
    return 0


def _newest(client: Client, args: Args, *, open_only: bool) -> list[Job]:
    found = newest(
        lambda cursor, limit: client.jobs.list(
            chat_key=args.chat_key, open_only=open_only, cursor=cursor, limit=limit
        ),
        limit=args.limit,
    )
    return [_job(item) for item in found]


def _watch(client: Client, args: Args, deps: Deps) -> None:
    if args.job_id is None:
        jobs = _newest(client, args, open_only=True)
    else:
        jobs = [_job(client.jobs.get(args.job_id))]

    async def read(job_id: str) -> Job:
        return _job(await asyncio.to_thread(client.jobs.get, job_id))

    run_async(watch(jobs, read, args, deps))


def _job(item: models.Job) -> Job:
    """Return a job as its row; what the API does not tell is None."""
    stated = item.model_dump(exclude={"plugin", "state"})
    values = dict.fromkeys(field.name for field in dataclasses.fields(Job)) | stated
    known = {field.name for field in dataclasses.fields(Job)}
    row = {name: value for name, value in values.items() if name in known}
    state = JobState.SUCCEEDED if item.state == "done" else JobState(item.state)
    return Job(**{**row, "plugin_key": item.plugin, "state": state})  # type: ignore[arg-type]
