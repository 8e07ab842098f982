"""Worker processes for the pool tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import WorkerProcess

from broker_config.app import NekroApp
from broker_config.settings import Settings


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Start workers that end with the test."""
    workers: list[WorkerProcess] = []

    def start(
        pool: str = "asyncio",
        *options: str,
        lane: str = "methods",
        concurrency: int = 10,
        settings: Settings = settings,
        wait: bool = True,
    ) -> WorkerProcess:
        worker = WorkerProcess(
            settings,
            tmp_path / f"worker{len(workers)}.log",
            pool=pool,
            lane=lane,
            concurrency=concurrency,
            options=options,
        )
        workers.append(worker)
        return worker.wait_ready() if wait else worker

    yield start
    for worker in workers:
        worker.kill()


@pytest.fixture
def send(app: NekroApp) -> Callable[..., Any]:
    """Send a task of ``pool_worker.py``; returns its AsyncResult."""

    def send(name: str, *args: object, queue: str = "methods", **options: object) -> Any:
        return app.send_task(name, args=args, queue=queue, **options)

    return send
