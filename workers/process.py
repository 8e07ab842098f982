"""One worker process: Celery's worker, its pool, and this process's services on the pool's loop.

The duration of its shutdown is bounded, whatever still runs. Each step of a shutdown has a limit, and most
steps share one (``nekro.base.greenlet_bridge.close_all``). A blocked thread has no limit: Python waits for
the threads of executors when it exits."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple

from celery import bootsteps, signals
from loguru import logger

from broker_config.settings import Settings
from nekro.app.processes import broker_id, configure_logs, data_dir_id
from nekro.base.greenlet_bridge import at_loop_close, limit_loop_close
from nekro.base.loop_thread import LoopThread
from nekro.base.metrics import start_metrics
from nekro.broker.celery.names import POOL_STEP
from nekro.broker.celery.worker import (
    allow_repeated_stop_signals,
    consume_queue,
    is_stopping,
    serve_new_tasks,
    why_it_consumes_nothing,
)
from nekro.broker.tracing import traced
from nekro.plugins.loader import PreparedPlugins
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NekroError, SettingsError
from nekro_agent.methods import Lane
from workers.ops.monitor import Health, monitored
from workers.ops.printed import printed_to_log
from workers.pools.observation import observe_tasks
from workers.services import WorkerServices
from workers.tasks import register_tasks

__all__ = [
    "ShutdownLimit",
    "keep_what_is_loaded",
    "run_worker",
]


#: Exit code of a worker whose shutdown exceeded its limit.
_CUT_EXIT: Final = 1


class _Order(NamedTuple):
    seconds: float
    code: int


class ShutdownLimit:
    """Ends the process a limited time after it was asked to stop; create one per worker process."""

    def __init__(self, *, warm_seconds: float, cold_seconds: float) -> None:
        """Start the thread, which does nothing until Celery stops the worker.

        Args:
            warm_seconds: limit of a shutdown that waits for running calls.
            cold_seconds: limit of a shutdown that stops them, as after a second signal.
        """
        self._seconds = {"Warm": warm_seconds, "Cold": cold_seconds, "Soft": warm_seconds}
        # A signal handler may use only this kind of queue: its `put` takes no Python lock.
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="nekro-shutdown-limit", daemon=True).start()
        allow_repeated_stop_signals()
        signals.worker_shutting_down.connect(self._stopping, weak=False)

    def closed(self, *, code: int) -> None:
        """Exit with this code soon: everything was closed, although a thread may still run."""
        self._orders.put(_Order(CLOSE_STEP_SECONDS, code=code))

    def _stopping(self, *, how: str, **_: object) -> None:
        self._orders.put(_Order(self._seconds.get(how, min(self._seconds.values())), code=_CUT_EXIT))

    def _watch(self) -> None:
        end, code = float("inf"), _CUT_EXIT
        while True:
            left = None if end == float("inf") else max(0.0, end - time.monotonic())
            try:
                order = self._orders.get(timeout=left)
            except queue.Empty:
                _end_process(code)
                return
            # A later order never extends the time.
            end, code = min(end, time.monotonic() + order.seconds), order.code


def _end_process(code: int) -> None:
    logger.bind(threads=_threads()).warning("shutdown_cut_short")
    sys.stderr.flush()
    os._exit(code)


def _threads() -> list[str]:
    """Describe each thread of the process but this one: its name and its innermost frame."""
    frames = sys._current_frames()
    return [
        f"{thread.name}: {_innermost(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
    ]


def _innermost(frame: FrameType | None) -> str:
    if frame is None:
        return "ended"
    last = traceback.extract_stack(frame)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"


ASYNCIO_POOL: Final = "workers.pools.asyncio_pool:AsyncioPool"

THREAD_POOL: Final = "workers.pools.thread_pool:ThreadPool"


def run_worker(
    settings: Settings,
    *,
    lane: str,
    concurrency: int | None,
    name: str | None,
    needs_model: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
    prepared: PreparedPlugins | None = None,
) -> int:
    """Serve one lane in the foreground until stopped; returns the exit code.

    Args:
        concurrency: None means the lane's setting.
        name: None means lane and process id.
        needs_model: as in ``RoundsService.start``, for lane ``rounds``.
        on_progress: called with what the worker does next, until it is ready.
        prepared: the plugins that this process has imported already.

    Raises:
        NekroError: the services could not start; nothing was consumed.
    """
    node = f"{name or f'{lane}-{os.getpid()}'}@{socket.gethostname()}"
    configure_logs(settings, lane=lane, worker=node)
    if settings.metrics.port:
        start_metrics().worker.labels(lane, node).set(1)
    services = WorkerServices.load(settings, role=lane, on_progress=on_progress, prepared=prepared)
    ids = {"data_dir_id": data_dir_id(services.settings), "broker_id": broker_id(services.settings)}
    health = Health(lane=lane, worker=node, database=services.database, ids=ids)
    home = _Home(services, health, needs_model=needs_model)
    services.app.awaits_plugins = lambda: not services.loaded.is_complete
    register_methods = home.register_methods = register_tasks(services, drain=home.drain)
    services.app.steps["worker"].add(_step(home))
    worker = services.app.Worker(
        hostname=node,
        pool_cls=THREAD_POOL if lane == Lane.LONG.value else ASYNCIO_POOL,
        concurrency=concurrency or _concurrency(services.settings, lane),
        queues=[lane],
        loglevel=settings.log.level,
        without_gossip=True,
        without_mingle=True,
        optimization="fair",
        quiet=True,
    )
    services.announcer.hostname = worker.hostname

    def serve_new_methods() -> None:
        if register_methods():
            serve_new_tasks(worker)

    services.on_new_methods = serve_new_methods
    limit = ShutdownLimit(
        warm_seconds=settings.workers.stop_seconds,
        cold_seconds=settings.workers.stop_seconds - settings.workers.drain_seconds,
    )
    with (
        traced(settings.tracing, role=lane, node=node, redact=services.redactor),
        monitored(settings, health, lane=lane),
        observe_tasks(),
        printed_to_log(),
    ):
        worker.start()
        home.close()
    code = int(worker.exitcode or 0)
    limit.closed(code=code)
    if home.failure is not None:
        raise home.failure
    return code


def _concurrency(settings: Settings, lane: str) -> int:
    limits = {
        Lane.METHODS.value: settings.workers.methods_concurrency,
        Lane.LONG.value: settings.workers.long_concurrency,
        Lane.ROUNDS.value: settings.workers.rounds_concurrency,
        Lane.PINNED.value: settings.workers.methods_concurrency,
    }
    if lane not in limits:
        raise SettingsError(f"unknown lane {lane!r}; choose one of {', '.join(limits)}")
    return limits[lane]


#: Allocations that trigger a garbage collection; each running call holds some 150 objects.
GARBAGE_THRESHOLD: Final = 10_000


class _Home:
    """The event loop of the services: the asyncio pool's, or one of their own beside a thread pool."""

    def __init__(self, services: WorkerServices, health: Health, *, needs_model: bool) -> None:
        self._services = services
        self._health = health
        self._needs_model = needs_model
        self.logs_json = services.settings.log.json_lines
        self._own_thread: LoopThread | None = None
        self._drain: Any = None
        self.register_methods: Callable[[], bool] = lambda: False
        #: Why the services did not start; the worker then stops.
        self.failure: NekroError | None = None

    def open(self, worker: Any) -> None:
        """Start the services before the first message is consumed.

        Raises:
            NekroError: they did not start.
        """
        loop = getattr(worker.pool, "loop", None)
        if loop is None:
            self._own_thread = LoopThread("nekro-home")
            self._own_thread.start()
            loop = self._own_thread.loop
        try:
            _wait(self._start(worker), loop)
        except NekroError as exc:
            self.failure = exc
            raise
        self._health.started(loop, consumes=lambda: why_it_consumes_nothing(worker))

    def drain(self) -> Any:
        """The drain of lane ``rounds``; set before any task runs."""
        return self._drain

    def close(self) -> None:
        """Close services that have a loop of their own; the pool's loop closes the others."""
        if self._own_thread is not None:
            self._own_thread.stop()

    async def _start(self, worker: Any) -> None:
        limit_loop_close(self._services.settings.workers.close_seconds)
        for step in reversed(self._services.closings()):
            at_loop_close(step.cleanup, seconds=step.seconds, what=step.what)
        await self._services.start()
        self.register_methods()
        sweeper = self._services.sweeper()
        sweeper.start()
        at_loop_close(sweeper.close)
        if self._services.role in (Lane.METHODS.value, Lane.PINNED.value):
            owner = self._services.pinned_owner(consume=partial(consume_queue, worker))
            owner.start()
            at_loop_close(owner.close, seconds=owner.close_seconds)
        if self._services.role == Lane.ROUNDS.value:
            from workers.rounds_service import RoundsService

            service = await RoundsService.start(
                self._services,
                slots=worker.concurrency,
                is_stopping=is_stopping,
                needs_model=self._needs_model,
            )
            at_loop_close(service.close)
            self._drain = service.drain
        keep_what_is_loaded()


def keep_what_is_loaded() -> None:
    """Exclude all current objects from garbage collection, and collect less often.

    What was loaded stays in memory anyway. Otherwise the collector would scan it again and again, for a
    tenth of a second each time, during which no call makes progress.
    """
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()


def _step(home: _Home) -> type[bootsteps.StartStopStep]:
    class ServicesStep(bootsteps.StartStopStep):  # type: ignore[misc]
        """Starts the services after the pool and before the consumer."""

        requires = (POOL_STEP,)

        def start(self, worker: Any) -> None:
            try:
                home.open(worker)
            except NekroError as exc:
                # SystemExit, because Celery would log a traceback of any other exception.
                if home.logs_json:  # otherwise the command prints the error in one line
                    logger.bind(error=str(exc)).error("worker_cannot_start")
                raise SystemExit(1) from exc

    return ServicesStep


def _wait(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        future.result()
    except FutureTimeoutError:
        future.cancel()
        raise
