"""Workers of several lanes that tests kill, stop, freeze and replace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from worker_fleet import Worker

from broker_config.settings import Settings
from nekro.cli.environment import environment_of

#: Attempts to start a worker that ends before it is ready, as the database may be down.
STARTS = 6


class Crew:
    """Worker processes; a taken one is not touched until it is returned or replaced."""

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        *,
        concurrency: int | None = None,
        least_running: int = 1,
        forks: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            least_running: with fewer running workers none can be taken.
            forks: whether workers are forked, which takes a sixth of the time of a new interpreter.
        """
        self._settings, self._directory = settings, directory
        self._concurrency, self._least_running = concurrency, least_running
        self._environment = None if forks else environment_of(settings)
        self._starting: set[Worker] = set()
        self._started = 0
        self._is_over = False
        self.running: list[Worker] = []
        #: Workers that ended by themselves, and their exit.
        self.deserters: list[str] = []

    async def start(self, lane: str) -> None:
        """Start one worker; returns when it consumes, or when the crew has been stopped.

        Raises:
            pytest.fail.Exception: it ended before it was ready in every attempt.
        """
        for attempt in range(1, STARTS + 1):
            self._started += 1
            log = self._directory / f"{lane}-{self._started}.log"
            worker = Worker(
                self._settings,
                log,
                lane=lane,
                concurrency=self._concurrency,
                environment=self._environment,
            )
            self._starting.add(worker)
            try:
                await asyncio.to_thread(worker.wait_ready)  # when this is cancelled, `stop` stops it
            except pytest.fail.Exception:
                self._starting.discard(worker)
                worker.kill()
                if self._is_over:
                    return
                if attempt == STARTS:
                    raise
                continue
            self._starting.discard(worker)
            self.running.append(worker)
            return

    def take(self, choice: float) -> Worker | None:
        """Take a worker out of the running ones; None while there are too few.

        Args:
            choice: which one, from 0 to 1.
        """
        if len(self.running) < self._least_running:
            return None
        return self.running.pop(min(int(choice * len(self.running)), len(self.running) - 1))

    def collect_deserters(self) -> list[str]:
        """Remove and record workers that have ended by themselves; returns their lanes."""
        ended = [worker for worker in self.running if worker.process.poll() is not None]
        for worker in ended:
            self.running.remove(worker)
            last = worker.log.read_text().splitlines()[-1:]
            self.deserters.append(f"{worker.log.stem} with status {worker.process.returncode}: {last}")
            worker.kill()
        return [worker.lane for worker in ended]

    async def stop(self) -> None:
        """Stop all that run or start."""
        self._is_over = True
        workers = [*self.running, *self._starting]
        for worker in workers:
            worker.thaw()
            worker.process.terminate()
        for worker in workers:
            await asyncio.to_thread(worker.stop)
