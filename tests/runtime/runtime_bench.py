"""Workers of lane ``long`` inside the test's process, with a publisher that delivers to them directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from broker_config.app import create_app
from broker_config.settings import DatabaseSettings, Settings
from nekro.app.background import BackgroundLoop
from nekro.app.chats.publisher import EventPublisher
from nekro.app.leases import LeaseKeeper
from nekro.base.redaction import Redactor
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from storage.tables import metadata
from workers.jobs.runner import Interruption, JobRunner
from workers.jobs.running import RunningJobs

LEASE_SECONDS = 30.0


class RecordingPublisher(EventPublisher):
    """Records what would be published; starts jobs with ``run_job`` when one is given."""

    def __init__(self) -> None:
        super().__init__(create_app(Settings.load(env_file=None, broker={"url": "redis://127.0.0.1:1/0"})))
        self.rounds: list[str] = []
        self.jobs: list[str] = []
        self.events: list[str] = []
        self.run_job: Callable[[str], Any] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def round_requested(self, chat_key: str, *, later: bool = False) -> None:
        self.rounds.append(chat_key)

    async def job_queued(self, job_id: str, chat_key: str) -> None:
        """Record the job and start it."""
        self.jobs.append(job_id)
        if self.run_job is not None:
            task = asyncio.ensure_future(self.run_job(job_id))
            self._running.add(task)

    async def revoke(self, task_id: str) -> None:
        self.events.append(f"revoke {task_id}")

    def events_added(
        self, chat_key: str, number: int, *, types: frozenset[str] = frozenset(), later: bool = False
    ) -> None:
        self.events.append(f"{chat_key} {number}")

    def live(self, chat_key: str, event: Mapping[str, Any]) -> bool:
        self.events.append(f"live {event['type']}")
        return True

    async def settled(self) -> None:
        """Wait until no job runs."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def stop(self) -> None:
        """Interrupt every job, as a stopping worker does."""
        for task in self._running:
            task.cancel()
        await self.settled()
        await self.close()


async def emptied(settings: DatabaseSettings, data_dir: Path) -> Database:
    """Open a database without rows."""
    database = Database(settings, data_dir)
    async with database.begin() as tx:
        for table in reversed(metadata.sorted_tables):
            await tx.connection.execute(table.delete())
    return database


class Bench:
    """Creates job runners, one per simulated worker."""

    def __init__(self, database: Database, background: BackgroundLoop, publisher: EventPublisher) -> None:
        self.database = database
        self.publisher = publisher
        self.background = background
        self.announced: list[tuple[str, int, str]] = []

    def runner(
        self, *plugins: NekroPlugin, name: str = "w1", lease_seconds: float = LEASE_SECONDS
    ) -> JobRunner:
        running = RunningJobs(
            LeaseKeeper(self.database, self.background),
            self.background,
            lease_seconds=lease_seconds,
            announce=lambda *report: self.announced.append(report),
            publisher=self.publisher,
            poll_seconds=0.05,
        )
        return JobRunner(
            running=running,
            publisher=self.publisher,
            plugin_of={plugin.key: plugin for plugin in plugins}.get,
            redactor=Redactor(("s3cret-value",), host_paths=()),
            worker_name=name,
        )


def shutdown() -> Interruption:
    """The reason for which the tests' workers stop jobs by default."""
    return Interruption.SHUTDOWN
