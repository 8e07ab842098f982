"""Lease renewals and sweeps: an unexpected error ends none of these loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_bench import RecordingPublisher

from broker_config.settings import AgentSettings
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from storage.repositories.chats import ChatRepository
from storage.repositories.downloads import DownloadRepository
from storage.repositories.jobs import JobRepository, NewJob
from storage.repositories.leases import LeaseRepository
from workers.jobs.downloads import SqlDownloads
from workers.jobs.keeper import JobKeeper, KeeperSettings
from workers.leases.chat_lease import ChatLease
from workers.ops.sweeper import Sweeper
from workers.plugins.lanes import LaneChooser
from workers.plugins.pinned import PinnedOwner
from workers.pools.background import BackgroundLoop

SECONDS = 30


class Fault:
    """Makes a method of a repository raise an unexpected error once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.succeeded = 0

    def inject(self, repository: type, name: str) -> None:
        """Make the next call fail; later ones work and are counted."""
        original = getattr(repository, name)
        has_failed = False

        async def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_failed
            if not has_failed:
                has_failed = True
                raise RuntimeError("unexpected")
            answer = await original(*args, **kwargs)
            self.succeeded += 1
            return answer

        self._monkeypatch.setattr(repository, name, method)

    async def is_survived(self) -> None:
        """Wait for a call after the failed one."""
        await until(lambda: self.succeeded > 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


async def test_a_chat_lease_is_renewed_after_an_unexpected_error(database: Database, fault: Fault) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
    lease = await ChatLease.acquire(database, "chat", owner="w", lease_seconds=3)
    assert lease is not None
    fault.inject(ChatRepository, "renew_lease")
    async with lease:
        await fault.is_survived()
        await lease.ensure()


async def test_a_job_claim_is_renewed_after_an_unexpected_error(
    database: Database, background: BackgroundLoop, fault: Fault
) -> None:
    async with database.begin() as tx:
        await tx.jobs.add(NewJob(id="job", plugin_key="a.p", type="t", task_id="t", chat_key="chat", args={}))
        job = await tx.jobs.claim("job", worker="w", lease_seconds=30)
    assert job is not None
    settings = KeeperSettings(
        database=database,
        background=background,
        lease_seconds=30,
        announce=lambda *_: None,
        look_seconds=0.05,
    )
    stopped: list[Any] = []
    fault.inject(JobRepository, "get")
    async with JobKeeper(settings, job, stop=stopped.append):
        await fault.is_survived()
    assert stopped == []


async def test_a_download_claim_is_renewed_after_an_unexpected_error(
    database: Database, background: BackgroundLoop, fault: Fault, tmp_path: Path
) -> None:
    downloads = SqlDownloads(database, background, data_dir=tmp_path, owner="w", lease_seconds=3)
    fault.inject(DownloadRepository, "keep")
    claim = await downloads.claim(tmp_path / "file", request="r")
    assert claim is not None
    await fault.is_survived()
    await claim.end(None)


def pinned_owner(
    database: Database, background: BackgroundLoop, refresh: Callable[[], Awaitable[None]]
) -> tuple[PinnedOwner, list[str]]:
    plugin, consumed = NekroPlugin("m", "pinned", "", "1", "Ada"), list[str]()
    owner = PinnedOwner(
        database=database,
        background=background,
        host=PluginHost([plugin]),
        lanes=LaneChooser(pinned_plugins={plugin.key}),
        owner="w",
        lease_seconds=3,
        is_fallback=False,
        refresh=refresh,
        consume=consumed.append,
    )
    return owner, consumed


async def test_a_pinned_plugin_is_renewed_after_an_unexpected_error(
    database: Database, background: BackgroundLoop, fault: Fault
) -> None:
    async def refresh() -> None:
        pass

    owner, consumed = pinned_owner(database, background, refresh)
    fault.inject(LeaseRepository, "renew")
    owner.start()
    await until(lambda: bool(consumed))
    await fault.is_survived()
    await owner.close()


async def test_pinned_plugins_are_acquired_after_an_unexpected_error(
    database: Database, background: BackgroundLoop
) -> None:
    tries = 0

    async def refresh() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("unexpected")

    owner, consumed = pinned_owner(database, background, refresh)
    owner.start()
    await until(lambda: bool(consumed))
    await owner.close()


async def test_sweeps_continue_after_an_unexpected_error(
    database: Database, recorder: RecordingPublisher, fault: Fault
) -> None:
    swept = asyncio.Event()

    async def sweep() -> None:
        swept.set()

    fault.inject(LeaseRepository, "acquire")
    sweeper = Sweeper(database, recorder, AgentSettings(lease_seconds=1), owner="w", sweeps=(sweep,))
    sweeper.start()
    async with asyncio.timeout(SECONDS):
        await swept.wait()
    await sweeper.close()
