"""A worker process for tests: ``python pool_worker.py SETTINGS_JSON LANE POOL CONCURRENCY [celery options]``.

Its tasks say what they do in the Redis list ``<prefix>ledger``, so that a test can wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

import redis
from celery import current_task
from celery.exceptions import SoftTimeLimitExceeded

from broker_config.app import WORKER_FLAGS, NekroApp, create_app
from broker_config.settings import Settings
from broker_config.urls import client_url
from broker_config.wire import Envelope, Signer
from nekro_agent.errors import MethodDisabledError
from nekro_agent.methods import SandboxMethodType
from workers.awaiting import at_loop_close, current_job, guarded, run_async

ABORTS: dict[str, type[BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
}


class Ledger:
    """Where tasks write down what they did."""

    def __init__(self, settings: Settings) -> None:
        self.key = f"{settings.broker.key_prefix}ledger"
        assert settings.broker.url
        self.client = redis.Redis.from_url(client_url(settings.broker.url))

    def write(self, task_id: str, *entry: object) -> None:
        """Append one entry: the task's id, then what happened."""
        self.client.rpush(self.key, json.dumps([task_id, *entry]))


def own_id() -> str:
    """The id of the task whose synchronous body asks; its coroutines run outside of its greenlet."""
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

    @app.task(name="t.who")
    def who() -> list[str]:
        before = current_task.request.id
        run_async(asyncio.sleep(0.01))
        return [before, current_task.request.id]


def register_hostile(app: NekroApp, ledger: Ledger) -> None:
    """Add tasks that abort, block or refuse to stop."""

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

    @app.task(name="m.wait")
    def method_wait(body: dict[str, Any]) -> dict[str, Any]:
        ledger.write(own_id(), "started")
        run_async(asyncio.sleep(float(signer.verify(body).args)))
        return envelope(body)

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

    @app.task(name="m.big")
    def big(body: dict[str, Any]) -> dict[str, Any]:
        return envelope(body, value="A" * (4 << 20))


def main() -> None:
    """Run a worker until it is told to stop."""
    raw, lane, pool, concurrency, *options = sys.argv[1:]
    settings = Settings.load(env_file=None, **json.loads(raw))
    app = create_app(settings, lane=lane)
    for register in (register_plain, register_hostile, register_loops, register_methods):
        register(app, Ledger(settings))
    celery_pool = "custom" if os.environ.get("CELERY_CUSTOM_WORKER_POOL") else pool
    app.worker_main(
        ["worker", "-Q", lane, "-P", celery_pool, "-c", concurrency, "-l", "INFO", *WORKER_FLAGS, *options]
    )


if __name__ == "__main__":
    main()
