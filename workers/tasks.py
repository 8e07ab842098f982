"""Defines the Celery tasks: each translates a message and delegates to code without Celery."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from celery import Celery, Task
from celery.exceptions import Ignore

from broker_config.app import checked_task_options
from broker_config.topology import COMMAND_TASK, DRAIN_TASK, HOOK_TASK, JOB_TASK
from messaging.celery.worker_state import is_revoked
from messaging.tracing import trace_headers
from nekro_agent.durations import GRACE_SECONDS
from runtime.greenlet_bridge import at_loop_close
from workers.calls.claims import DuplicateDelivery
from workers.calls.executor import MethodExecutor, MisplacedCall
from workers.jobs.runner import Interruption
from workers.pools.awaiting import StopReason, current_job, run_async
from workers.pools.fast_path import FAST_BODY

if TYPE_CHECKING:
    from workers.composition import Services
    from workers.rounds.drain import RoundDrain

__all__ = ["register_commands", "register_drain", "register_hooks", "register_jobs", "register_methods"]


def register_methods(services: Services) -> None:
    """Register a Celery task ``author.module.function`` for each method of the catalogue.

    Disabled methods are registered too, so that this worker answers their callers with an error.
    """
    executor, cleanups = services.executor, _LoopCleanups(services)
    for entry in services.registry:
        options = checked_task_options(name=entry.task, typing=False, shared=False, bind=True)
        run, execute = _method_body(entry.task, executor, cleanups)
        setattr(services.app.task(**options)(run), FAST_BODY, execute)


def register_commands(services: Services) -> None:
    """Register the task that runs plugins' commands."""
    executor, cleanups = services.command_executor, _LoopCleanups(services)

    async def execute(body: dict[str, Any]) -> dict[str, Any]:
        cleanups.ensure()
        return await executor.execute(body)

    def run(body: dict[str, Any]) -> dict[str, Any]:
        try:
            return run_async(execute(body))
        except DuplicateDelivery as exc:
            raise Ignore("another delivery of this command is running") from exc

    services.app.task(**checked_task_options(name=COMMAND_TASK, typing=False, shared=False))(run)


def register_hooks(services: Services) -> None:
    """Register the task that runs hooks of pinned plugins."""
    executor, cleanups = services.hook_executor, _LoopCleanups(services)

    async def execute(body: dict[str, Any]) -> dict[str, Any]:
        cleanups.ensure()
        return await executor.execute(body)

    def run(task: Task, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return run_async(execute(body))
        except MisplacedCall as exc:
            _send_home(task, exc)
            raise Ignore(str(exc)) from exc

    options = checked_task_options(name=HOOK_TASK, typing=False, shared=False, bind=True)
    services.app.task(**options)(run)


def register_drain(app: Celery, drain: Callable[[], RoundDrain]) -> None:
    """Register the task that drains a chat."""

    def body(chat_key: str) -> None:
        run_async(drain().drain(chat_key))

    app.task(**checked_task_options(name=DRAIN_TASK, shared=False, ignore_result=True))(body)


def register_jobs(services: Services) -> None:
    """Register the task that executes background jobs; their claimed rows decide which worker runs one."""
    runner, announcer, cleanups = services.job_runner, services.announcer, _LoopCleanups(services)
    seconds = services.settings.workers.long_timeout_seconds

    async def execute(job_id: str) -> dict[str, str]:
        cleanups.ensure()
        try:
            result = await runner.run(job_id, interruption=lambda: _interruption(job_id))
        finally:
            await announcer.settled()
        return {"state": result.state.value, "message": result.message}

    def body(job_id: str) -> dict[str, str]:
        try:
            return run_async(execute(job_id))
        except DuplicateDelivery as exc:
            raise Ignore("the job has ended, or another worker has it") from exc

    options = checked_task_options(
        name=JOB_TASK, shared=False, soft_time_limit=seconds, time_limit=seconds + GRACE_SECONDS
    )
    services.app.task(**options)(body)


def _interruption(job_id: str) -> Interruption:
    delivery = current_job()
    if delivery is not None and delivery.stop_reason in (StopReason.SOFT_LIMIT, StopReason.HARD_LIMIT):
        return Interruption.TIME_LIMIT
    return Interruption.REVOKED if is_revoked(job_id) else Interruption.SHUTDOWN


def _method_body(
    task_name: str, executor: MethodExecutor, cleanups: _LoopCleanups
) -> tuple[Callable[[Task, dict[str, Any]], dict[str, Any]], Callable[[dict[str, Any]], Awaitable[Any]]]:
    def begin(body: dict[str, Any]) -> Awaitable[dict[str, Any]]:
        cleanups.ensure()
        return executor.execute(body, task_name=task_name)

    async def execute(body: dict[str, Any]) -> dict[str, Any]:
        return await begin(body)

    def run(task: Task, body: dict[str, Any]) -> dict[str, Any]:
        job = current_job()
        try:
            if job is not None and job.outcome is not None:
                known: dict[str, Any] = job.outcome.get()
                return known
            return run_async(execute(body))
        except DuplicateDelivery as exc:
            # Neither success nor failure: the delivery that runs the call will store the result.
            raise Ignore("another delivery of this call is running") from exc
        except MisplacedCall as exc:
            # Its sender did not know yet that the plugin is pinned.
            _send_home(task, exc)
            raise Ignore(str(exc)) from exc

    functools.update_wrapper(run, execute, assigned=("__doc__",))
    run.__name__ = task_name.rpartition(".")[2]
    return run, begin


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

    def __init__(self, services: Services) -> None:
        self._services = services
        # Not keyed by id(): the id of a deleted loop may be reused.
        self._seen: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def ensure(self) -> None:
        """Register the cleanup of the running loop once."""
        loop = asyncio.get_running_loop()
        if loop not in self._seen:
            self._seen.add(loop)
            at_loop_close(self._services.database.dispose_loop)
