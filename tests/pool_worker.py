"""A worker process for tests: ``python pool_worker.py SETTINGS_JSON LANE POOL CONCURRENCY [celery options]``.

Its tasks record their steps in the Redis list ``<prefix>ledger``, so that a test can wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any

import redis
from celery import current_task, signals
from celery.concurrency import ALIASES
from celery.exceptions import SoftTimeLimitExceeded
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from broker_config.app import NekroApp, create_app
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings
from nekro.base.metrics import start_metrics
from nekro.broker.celery.worker import serve_new_tasks
from nekro.wire.invocation import Envelope, Signer
from nekro_agent.core.logger import configure
from nekro_agent.errors import ArgumentError, MethodDisabledError, ResultError
from nekro_agent.methods import SandboxMethodType
from workers.calls.claims import DuplicateDelivery
from workers.pools.asyncio_pool import FAST_BODY
from workers.pools.base import at_loop_close, current_job, guarded, run_async
from workers.pools.observation import observe_tasks
from workers.tasks import task_body

#: Option of this program; the others are Celery's.
TRACED = "--traced"
ABORTS: dict[str, type[BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
}
FAILURES: dict[str, type[BaseException]] = ABORTS | {
    "ValueError": ValueError,
    "ArgumentError": ArgumentError,
    "ResultError": ResultError,
    "DuplicateDelivery": DuplicateDelivery,
}


class Ledger:
    """Where tasks record their steps."""

    def __init__(self, settings: Settings) -> None:
        self.key = f"{settings.broker.key_prefix}ledger"
        endpoint = RedisEndpoint(settings.broker, settings.broker.url)
        # A failover takes seconds, and what fails here would count as the method's failure.
        parameters = {**endpoint.parameters(), "retry": Retry(ConstantBackoff(0.1), 100)}
        pool = redis.ConnectionPool(connection_class=endpoint.connection_class, **parameters)
        self.client = redis.Redis.from_pool(pool)

    def write(self, task_id: str, *entry: object) -> None:
        """Append one entry: the task's id, then what happened."""
        self.client.rpush(self.key, json.dumps([task_id, *entry]))


def own_id() -> str:
    """Id of the task whose synchronous body is running; its coroutines run outside of its greenlet."""
    return str(current_task.request.id)


def register_plain(app: NekroApp, ledger: Ledger) -> None:
    """Add tasks that end in the usual ways."""

    @app.task(name="t.wait")
    def wait(seconds: float) -> str:
        task_id = own_id()

        async def body() -> str:
            ledger.write(task_id, "started")
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                job = current_job()
                ledger.write("?", "cancelled", str(job and job.stop_reason))
                raise
            return "done"

        value = run_async(body())
        ledger.write(task_id, "finished")
        return value

    @app.task(name="t.secret")
    def secret(text: str) -> int:
        return len(text)

    consumers: list[Any] = []
    signals.worker_ready.connect(lambda sender, **_: consumers.append(sender), weak=False)

    @app.task(name="t.register")
    def register(name: str) -> None:
        """Register one more task, which the consumer does not know before `t.serve`."""

        @app.task(name=name)
        def late() -> str:
            return "late"

    @app.task(name="t.serve")
    def serve() -> None:
        serve_new_tasks(consumers[-1].controller)

    @app.task(name="t.who")
    def who() -> list[str]:
        before = current_task.request.id
        run_async(asyncio.sleep(0.01))
        return [before, current_task.request.id]


def register_hostile(app: NekroApp, ledger: Ledger) -> None:
    """Add tasks that abort, block or ignore cancellation."""

    @app.task(name="t.abort")
    def abort(name: str, how: str) -> None:
        async def body() -> None:
            await asyncio.sleep(0)
            raise ABORTS[name]()

        if how == "coroutine":
            run_async(body())
        elif how == "guarded":
            with guarded():
                raise ABORTS[name]()
        raise ABORTS[name]()

    @app.task(name="t.stubborn")
    def stubborn(seconds: float) -> str:
        task_id = own_id()

        async def body() -> str:
            ledger.write(task_id, "started")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    await asyncio.sleep(end - time.monotonic())
                except asyncio.CancelledError:
                    continue
            return "late"

        return run_async(body())


def register_loops(app: NekroApp, ledger: Ledger) -> None:
    """Add tasks about limits and loops."""

    @app.task(name="t.abandon")
    def abandon() -> None:
        async def cleanup() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ledger.write("?", "abandoned")

        async def body() -> None:
            cleaning = asyncio.create_task(cleanup())
            await asyncio.wait([cleaning])

        run_async(body())

    @app.task(name="t.soft")
    def soft() -> str:
        try:
            run_async(asyncio.sleep(60))
        except SoftTimeLimitExceeded:
            return "cleaned up"
        return "not stopped"

    @app.task(name="t.block")
    def block(seconds: float) -> str:
        with guarded():
            ledger.write(own_id(), "started")
            time.sleep(seconds)
        return "done"

    @app.task(name="t.loop")
    def loop_identity() -> int:
        async def body() -> int:
            loop = asyncio.get_running_loop()

            async def cleanup() -> None:
                ledger.write("?", "cleaned")

            if not getattr(loop, "_seen", False):
                at_loop_close(cleanup)
            return id(loop)

        return run_async(body())


def register_methods(app: NekroApp, ledger: Ledger) -> None:
    """Add tasks that answer a MethodCaller."""
    signer = Signer.from_text("test-signing-key")

    def envelope(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
        invocation = signer.verify(body)
        now = datetime.now(UTC)
        return Envelope(
            call_id=invocation.call_id, type=SandboxMethodType.TOOL, started_at=now, finished_at=now, **fields
        ).model_dump(mode="json")

    @app.task(name="m.noop")
    def noop(body: dict[str, Any]) -> dict[str, Any]:
        async def nothing() -> str:
            return "x"

        return envelope(body, text=run_async(nothing()))

    def method_wait(body: dict[str, Any]) -> dict[str, Any]:
        ledger.write(own_id(), "started")
        run_async(asyncio.sleep(float(signer.verify(body).args)))
        return envelope(body)

    for plugin in ("m", "n"):
        app.task(name=f"{plugin}.wait")(method_wait)

    @app.task(name="m.fail")
    def fail(body: dict[str, Any]) -> None:
        kind = signer.verify(body).args
        if kind == "ours":
            raise MethodDisabledError("plugin a.b is disabled")
        if kind == "empty":
            raise ValueError
        raise type("Weird", (Exception,), {})("one", 2)

    @app.task(name="m.garbage")
    def garbage(body: dict[str, Any]) -> str:
        return "no envelope"

    @app.task(name="m.echo")
    def echo(body: dict[str, Any]) -> dict[str, Any]:
        return envelope(body, text=signer.verify(body).args)

    @app.task(name="m.big")
    def big(body: dict[str, Any]) -> dict[str, Any]:
        return envelope(body, value="A" * (4 << 20))


class Methods:
    """Result of ``f.run``, chosen by ``how`` in its body; replaces the handler of calls."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def execute(self, body: dict[str, Any]) -> Any:
        """Record the execution and its path, then behave as the body says."""
        job = current_job()
        assert job is not None
        self._ledger.write(job.task_id, "started", "tracer" if job.observation is None else "fast")
        return await getattr(self, body["how"])(body)

    async def ok(self, body: dict[str, Any]) -> Any:
        return body.get("value")

    async def fail(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        raise FAILURES[body["name"]]("what happened")

    async def wait(self, body: dict[str, Any]) -> str:
        await asyncio.sleep(body["seconds"])
        return "done"

    async def until(self, body: dict[str, Any]) -> str:
        """Wait until a file exists."""
        while not os.path.exists(body["path"]):
            await asyncio.sleep(0.01)
        print("the method ends", flush=True)
        return "done"

    async def clean_up(self, body: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "cleaned up"
        return "not stopped"

    async def stubborn(self, body: dict[str, Any]) -> str:
        """Swallow every cancellation until a file exists."""
        while not os.path.exists(body["path"]):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return "late"

    async def block(self, body: dict[str, Any]) -> str:
        """Block the event loop until a file exists."""
        while not os.path.exists(body["path"]):
            time.sleep(0.01)
        return "done"

    async def odd(self, body: dict[str, Any]) -> Any:
        """Return a value that JSON cannot hold."""
        return object()

    async def deep(self, body: dict[str, Any]) -> Any:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        return value


def _listener(**_: Any) -> None:
    """Connect a signal receiver, as an extension of Celery does."""


def register_fast(app: NekroApp, ledger: Ledger, *, is_traced: bool) -> None:
    """Add a task made like those of methods, and tasks that report on it.

    Args:
        is_traced: use Celery's tracer, which must end calls in the same way.
    """
    execute = Methods(ledger).execute
    run = task_body(execute, before=lambda: None)
    task = app.task(name="f.run", bind=True, typing=False)(run)
    if not is_traced:
        setattr(task, FAST_BODY, execute)
    figures = start_metrics()

    @app.task(name="t.note")
    def note(*what: Any) -> None:
        ledger.write(own_id(), "noted", *what)

    @app.task(name="t.listen")
    def listen(name: str) -> None:
        getattr(signals, name).connect(_listener, dispatch_uid="test", weak=False)

    @app.task(name="t.unlisten")
    def unlisten(name: str) -> None:
        getattr(signals, name).disconnect(dispatch_uid="test")

    taken: dict[str, str] = {}

    def on_received(request: Any, **_: Any) -> None:
        taken[request.id] = threading.current_thread().name

    @app.task(name="t.watch_intake")
    def watch_intake() -> None:
        signals.task_received.connect(on_received, weak=False)

    @app.task(name="t.taken")
    def tell_taken() -> dict[str, str]:
        return taken

    @app.task(name="t.figures")
    def tell_figures() -> dict[str, Any]:
        (in_flight,) = figures.calls_in_flight.collect()
        (calls,) = figures.calls.collect()
        return {
            "in_flight": in_flight.samples[0].value,
            "f.run": {
                sample.labels["outcome"]: sample.value
                for sample in calls.samples
                if sample.name.endswith("_total") and sample.labels["method"] == "f.run"
            },
        }


def main() -> None:
    """Run a worker until it receives a stop signal."""
    raw, lane, pool, concurrency, *options = sys.argv[1:]
    settings = Settings.load(env_file=None, **json.loads(raw))
    configure()  # so that records show their fields
    app = create_app(settings, lane=lane)
    for register in (register_plain, register_hostile, register_loops, register_methods):
        register(app, Ledger(settings))
    register_fast(app, Ledger(settings), is_traced=TRACED in options)
    custom = os.environ.get("CELERY_CUSTOM_WORKER_POOL")
    if custom:
        ALIASES["custom"] = custom  # as Celery does at import, which happened before the variable was set
    celery_pool = "custom" if custom else pool
    with observe_tasks():
        app.worker_main(
            [
                "worker",
                "-Q",
                lane,
                "-P",
                celery_pool,
                "-c",
                concurrency,
                "-l",
                "INFO",
                "--without-gossip",
                "--without-mingle",
                *(option for option in options if option != TRACED),
            ]
        )


if __name__ == "__main__":
    main()
