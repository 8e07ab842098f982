"""Defines the Celery tasks: each translates a message and delegates to code without Celery."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from celery import Task
from celery.exceptions import Ignore

from broker_config.app import checked_task_options
from broker_config.topology import COMMAND_TASK, DRAIN_TASK, HOOK_TASK, JOB_TASK, RUN_TASK
from nekro.app.calls.records import CallRecords
from nekro.app.catalogue import BUILT_IN_TASKS
from nekro.base.greenlet_bridge import at_loop_close
from nekro.base.loop_thread import LoopThread, this_task
from nekro.base.tasks import complete
from nekro.broker.celery.worker import is_revoked
from nekro.broker.tracing import trace_headers
from nekro.wire.author_frames import attached
from nekro_agent.durations import GRACE_SECONDS
from nekro_agent.errors import NekroError
from nekro_agent.methods import Lane
from workers.calls.claims import DuplicateDelivery
from workers.calls.handler import FindTarget, MisplacedCall
from workers.jobs.runner import Interruption
from workers.pools.asyncio_pool import FAST_BODY
from workers.pools.base import StopReason, current_job, run_async

if TYPE_CHECKING:
    from workers.rounds.drain import RoundDrain
    from workers.services import WorkerServices

__all__ = ["register_tasks", "task_body"]

#: Work of a task: takes its argument, returns its result as JSON data.
Execute = Callable[[Any], Awaitable[Any]]


def register_tasks(services: WorkerServices, *, drain: Callable[[], RoundDrain]) -> Callable[[], bool]:
    """Register the tasks of this process's lane: calls on every lane, drains, runs and jobs on their own.

    Each method of the catalogue is a task ``author.module.function``, and each webhook one
    ``author.module.webhook:<endpoint>``. Disabled methods are registered too,
    so that this worker answers their callers with an error.

    Returns a function that registers the methods which are offered now; it returns whether there are new
    ones. Call it when the plugins have started, and after each change.

    Args:
        drain: returns the drain of lane ``rounds``; not called on other lanes.
    """
    cleanups, handle = _LoopCleanups(services), services.call_handler.handle
    records = CallRecords(services.database, services.registry)

    async def end_of(task: str, task_id: str, argument: Any) -> dict[str, Any] | NekroError | None:
        if task not in (DRAIN_TASK, JOB_TASK):
            return await records.end_of(task_id)
        async with services.database.read() as transaction:
            if task == DRAIN_TASK:
                return None if await transaction.rounds.has_open(argument) else {}
            job = await transaction.jobs.find(argument)
        return {} if job is None or job.state.is_final else None

    services.app.recorded_end = lambda *task: services.background.answer(end_of(*task), seconds=GRACE_SECONDS)

    def register(name: str, execute: Execute, **options: Any) -> None:
        run = task_body(execute, before=cleanups.ensure)
        # Celery writes the name into source code; that of a webhook ends with any text.
        run.__name__ = name.partition(":")[0].rpartition(".")[2]
        checked = checked_task_options(name=name, typing=False, shared=False, bind=True, **options)
        setattr(services.app.task(**checked)(run), FAST_BODY, execute)

    methods, command_lines, hooks = services.methods, services.command_lines, services.forwarded_hooks

    def register_calls(name: str, find: FindTarget) -> None:
        register(name, functools.partial(handle, task_name=name, find=find))

    registered: set[str] = set()

    def register_methods() -> bool:
        finders = {entry.task: methods.find for entry in services.registry}
        finders |= dict.fromkeys(services.loaded_registry.webhook_tasks, services.webhooks.find)
        new = finders.keys() - registered
        registered.update(new)
        for name in new:
            register_calls(name, finders[name])
        return bool(new)

    register_calls(COMMAND_TASK, lambda _: command_lines)
    register_calls(HOOK_TASK, lambda _: hooks)
    for task in BUILT_IN_TASKS:
        register_calls(task, lambda call: services.built_in_methods.find(call))
    if services.role == Lane.ROUNDS.value:
        register(DRAIN_TASK, lambda chat_key: drain().drain(chat_key), ignore_result=True)
        register_calls(RUN_TASK, lambda _: services.code_target)
    owns = services.settings.files.in_store and services.role in (Lane.METHODS.value, Lane.PINNED.value)
    if services.role == Lane.LONG.value or owns:
        seconds = services.settings.workers.long_timeout_seconds
        register(
            JOB_TASK,
            functools.partial(_run_job_on_thread if owns else _run_job, services),
            soft_time_limit=seconds,
            time_limit=seconds + GRACE_SECONDS,
        )
    return register_methods


def task_body(execute: Execute, *, before: Callable[[], None]) -> Callable[[Task, Any], Any]:
    """Return the synchronous body of a bound task of one argument; the fast path awaits ``execute`` itself.

    Args:
        execute: the work; ``DuplicateDelivery`` and ``MisplacedCall`` end the task without a result.
        before: called before each execution, on its event loop, which may be a thread's own.
    """

    async def awaited(argument: Any) -> Any:
        before()
        return await execute(argument)

    def run(task: Task, argument: Any) -> Any:
        job = current_job()
        try:
            if job is not None and job.outcome is not None:
                return job.outcome.get()
            return run_async(awaited(argument))
        except DuplicateDelivery as exc:
            # Neither success nor failure: the delivery that runs the work stores the result.
            raise Ignore("it has ended, or another delivery of it is running") from exc
        except MisplacedCall as exc:
            # Its sender did not know yet that the plugin is pinned.
            _send_home(task, exc)
            raise Ignore(str(exc)) from exc
        except Exception as exc:
            # For the result backend: Celery may replace the exception by one that can be pickled.
            task.request.author_frames = attached(exc)
            raise

    return run


async def _run_job(services: WorkerServices, job_id: str) -> dict[str, str]:
    if (home := await services.home_of_job(job_id)) is not None:
        raise MisplacedCall(home, job_id)
    try:
        result = await services.job_runner.run(job_id, interruption=lambda: _interruption(job_id))
    finally:
        await services.announcer.settled()
    return {"state": result.state.value, "message": result.message}


async def _run_job_on_thread(services: WorkerServices, job_id: str) -> dict[str, str]:
    """Run a job at the owner of its plugin, on a loop that it may block, as in lane ``long``."""
    thread = LoopThread("nekro-job")
    begun: list[asyncio.Task[Any]] = []

    def cancel() -> None:
        for task in begun:
            task.cancel()

    async def run() -> dict[str, str]:
        begun.append(this_task())
        at_loop_close(services.database.dispose_loop)
        return await _run_job(services, job_id)

    thread.start()
    try:
        job = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), thread.loop))
        while not job.done():
            try:
                await asyncio.wait({job})
            except asyncio.CancelledError:  # it cleans up, for as long as it may
                thread.call(cancel)
        return job.result()
    finally:
        await complete(asyncio.to_thread(thread.stop))


def _interruption(job_id: str) -> Interruption:
    delivery = current_job()
    if delivery is not None and delivery.stop_reason in (StopReason.SOFT_LIMIT, StopReason.HARD_LIMIT):
        return Interruption.TIME_LIMIT
    return Interruption.REVOKED if is_revoked(job_id) else Interruption.SHUTDOWN


def _send_home(task: Task, misplaced: MisplacedCall) -> None:
    """Send a call to the process that owns its plugin, signed for that process's queue."""
    app, request = task.app, task.request
    hard, soft = request.timelimit or (None, None)
    message = app.amqp.signed_task(
        request.id,
        task.name,
        [misplaced.body],
        queue=misplaced.queue,
        reply_to=request.reply_to,
        time_limit=hard,
        soft_time_limit=soft,
    )
    message.headers.update(trace_headers())

    def send() -> None:
        with app.producer_or_acquire() as producer:
            app.amqp.send_task_message(producer, task.name, message, queue=misplaced.queue)

    run_async(asyncio.to_thread(send))


class _LoopCleanups:
    """Closes a loop's database connections with the loop; in lane ``long`` each thread has a loop."""

    def __init__(self, services: WorkerServices) -> None:
        self._services = services
        # Not keyed by id(): the id of a deleted loop may be reused.
        self._seen: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def ensure(self) -> None:
        """Register the cleanup of the running loop once."""
        loop = asyncio.get_running_loop()
        if loop not in self._seen:
            self._seen.add(loop)
            at_loop_close(self._services.database.dispose_loop)
