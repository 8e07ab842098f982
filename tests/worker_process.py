"""Start and stop the worker of ``pool_worker.py`` and read its journal."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked_process import ForkedProcess
from waiting import WAIT_SECONDS, wait_until

from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings

POOLS = {
    "asyncio": "workers.pools.asyncio_pool:AsyncioPool",
    "threads": "workers.pools.thread_pool:ThreadPool",
}


class WorkerProcess:
    """One worker in a process of its own."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        *,
        pool: str,
        lane: str,
        concurrency: int,
        options: tuple[str, ...],
    ) -> None:
        self.settings, self.log = settings, log
        environ = os.environ | {"CELERY_CUSTOM_WORKER_POOL": POOLS.get(pool, "")}
        values = settings.model_dump(mode="json")
        values["security"] = {"signing_key": "test-signing-key"}
        arguments = [json.dumps(values), lane, pool, str(concurrency), "-n", f"{log.stem}@test", *options]
        with log.open("ab") as output:
            self.process = ForkedProcess("pool_worker", arguments, environ=environ, stdout=output.fileno())

    def wait_ready(self) -> WorkerProcess:
        """Wait until it consumes."""
        self.wait_log(" ready.")
        return self

    def wait_log(self, text: str, *, seconds: float = WAIT_SECONDS) -> None:
        """Wait until its log contains a text."""
        wait_until(
            lambda: text in self.log.read_text() or self.process.poll() is not None,
            seconds=seconds,
            what=lambda: f"{text!r} in the log:\n{self.log.read_text()}",
        )
        assert text in self.log.read_text(), f"the worker ended:\n{self.log.read_text()}"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, *, seconds: float = WAIT_SECONDS) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """SIGKILL and reap."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):  # its session does not exist yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def ledger(self) -> list[list[Any]]:
        """Journal entries of its tasks so far."""
        return read_ledger(self.settings)


def read_ledger(settings: Settings) -> list[list[Any]]:
    """Journal entries of all workers' tasks under a key prefix so far."""
    with RedisEndpoint(settings.broker, settings.broker.url).client() as client:
        return [json.loads(raw) for raw in client.lrange(f"{settings.broker.key_prefix}ledger", 0, -1)]


def queued(client: Any, queue: str) -> int:
    """Number of messages that wait in the queue with this key, also those that wait for their turn."""
    return int(client.llen(queue)) + int(client.get(f"{queue}:fair_length") or 0)
