"""The SDK's services on a real database; jobs run in this process, as a worker would run them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from runtime_bench import Bench, RecordingPublisher, emptied
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro_agent.api.plugin import NekroPlugin
from storage.engine import Database
from workers.jobs.service import SqlJobs


@pytest.fixture(scope="session")
def migrated(
    tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str, Path], str]
) -> Callable[[str], DatabaseSettings]:
    """Return the session's migrated database of a kind."""

    @functools.cache
    def settings(kind: str) -> DatabaseSettings:
        url = new_database(kind, tmp_path_factory.mktemp("runtime"))
        return DatabaseSettings(url=url, pool_timeout_seconds=WAIT_SECONDS)

    return settings


@pytest.fixture(params=["sqlite", "postgres"])
def kind_settings(
    request: pytest.FixtureRequest, migrated: Callable[[str], DatabaseSettings]
) -> DatabaseSettings:
    """Settings of a migrated database of each kind."""
    return migrated(request.param)


@pytest.fixture
async def database(kind_settings: DatabaseSettings, tmp_path: Path) -> AsyncIterator[Database]:
    """An empty, migrated database of each kind."""
    database = await emptied(kind_settings, tmp_path)
    yield database
    await database.dispose()


@pytest.fixture
async def background(database: Database) -> AsyncIterator[BackgroundLoop]:
    """A background loop on that database."""
    background = BackgroundLoop(database)
    yield background
    await asyncio.to_thread(background.close)


@pytest.fixture
async def recorder() -> AsyncIterator[RecordingPublisher]:
    """A publisher without a broker."""
    recorder = RecordingPublisher()
    yield recorder
    await recorder.stop()


@pytest.fixture
def bench(database: Database, background: BackgroundLoop, recorder: RecordingPublisher) -> Bench:
    """Creates job runners."""
    return Bench(database, background, recorder)


@pytest.fixture(autouse=True)
def patient_reads_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's query of a job blocks its loop for a second at most; a busy machine takes longer."""
    monkeypatch.setattr("workers.jobs.service.ANSWER_SECONDS", WAIT_SECONDS)


@pytest.fixture
def plugin() -> NekroPlugin:
    return NekroPlugin(name="J", module_name="jobs", description="", version="1", author="tests", url="")


@pytest.fixture
def jobs(database: Database, background: BackgroundLoop, recorder: RecordingPublisher) -> SqlJobs:
    return SqlJobs(database, background, recorder)
