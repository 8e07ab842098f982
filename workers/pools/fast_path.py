"""Runs a method's call without Celery's tracer as long as it succeeds: the fast path.

The tracer is synchronous, so in the asyncio pool each task needs a greenlet and its stack memory,
and it supports chains, chords and retries, which admitted messages never use. The fast path is a
coroutine instead. Every end other than success, in the method or in Redis, is passed to the tracer
with the outcome so far: Celery alone handles failures, stops, duplicates and results that cannot be
stored, and the method never runs a second time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from celery import signals
from celery.exceptions import SoftTimeLimitExceeded

from messaging.celery.private_tasks import PrivateRequest
from messaging.celery.result_backend import ReplyBackend
from runtime.greenlet_bridge import spawn
from workers.pools.jobs import Body as Stoppable
from workers.pools.jobs import Interruptible, Job, Outcome, StopReason, aborted
from workers.pools.observation import begin_observation, is_only_observer

__all__ = ["FAST_BODY", "run_job"]

Body = Callable[..., Awaitable[Any]]

#: Attribute of a Celery task: a function that returns an awaitable of the body's result as JSON data.
FAST_BODY = "nekro_fast_body"


def run_job(job: Job, tasks: Mapping[str, Any]) -> Awaitable[None]:
    """Run a delivery to its end: result stored, message acknowledged.

    Args:
        tasks: the app's tasks by name.
    """
    task = tasks.get(job.args[0])
    body: Body | None = getattr(task, FAST_BODY, None)
    request = getattr(job.callback, "__self__", None)
    if body is None or not isinstance(request, PrivateRequest) or not _is_plain(task, request):
        return spawn(job.run)
    return _run(job, body, task, request)


def _is_plain(task: Any, request: PrivateRequest) -> bool:
    has_result = not (task.ignore_result or request.ignore_result)
    return has_result and is_only_observer() and not signals.task_success.receivers


async def _run(job: Job, body: Body, task: Any, request: PrivateRequest) -> None:
    if not job.begin():
        return
    try:
        began = time.monotonic()
        if job.accept_callback is not None:
            job.accept_callback(job.pid, began)
        observation = job.observation = begin_observation(
            task.name, request.id, request.args, request.request_dict
        )
        job.outcome = outcome = await _outcome(job, body, request)
        if outcome.error is None and await _store(task.backend, request, outcome.value):
            observation.end("ok")
            job.succeed(request.shown(outcome.value), time.monotonic() - began)
        else:
            await spawn(lambda: job.trace(accept=None))
    except Exception as exc:  # edge of the pool: the slot must be freed whatever happened
        job.escape(exc)


async def _store(backend: Any, request: PrivateRequest, value: Any) -> bool:
    if not isinstance(backend, ReplyBackend):
        return False
    ending = request.ending
    is_stored = False
    try:
        is_stored = await backend.store_success(request.id, value, reply_to=request.reply_to, ending=ending)
    finally:
        if ending is not None:
            ending.end(is_stored)
    return is_stored


def _begun(job: Job, body: Body, request: PrivateRequest) -> Awaitable[Any]:
    """Start the body, then drop the arguments, which nothing else needs."""
    begun = body(*request.args)
    request.release_body()
    name, task_id, headers, _, *encoding = job.args
    job.args = (name, task_id, headers, request.body, *encoding)
    return begun


async def _outcome(job: Job, body: Body, request: PrivateRequest) -> Outcome:
    guard = Interruptible()
    try:
        with Stoppable():
            try:
                with guard:
                    return Outcome(value=await _begun(job, body, request))
            except asyncio.CancelledError as exc:
                if guard.was_interrupted and job.stop_reason is StopReason.SOFT_LIMIT:
                    raise SoftTimeLimitExceeded(job.soft_limit_seconds) from exc
                if _is_loop_closing():
                    raise
                raise aborted(exc) from exc
    except Exception as exc:
        return Outcome(error=exc)


def _is_loop_closing() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
