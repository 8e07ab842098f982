"""Model downloads in a fleet: one for all callers, resumed after the worker is killed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from range_server import RangeServer, Serve
from waiting import WAIT_SECONDS, eventually
from worker_fleet import plugin_of

from nekro.app import use_cases
from nekro.app.services import Services
from nekro_agent.ports import JobState

CONTENT = hashlib.shake_256(b"a model").digest(12 << 20)


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Any:
    return make_fleet(
        downloads={"allow_private": ("127.0.0.0/8",)},
        broker={"visibility_timeout_seconds": 4},
        agent={"lease_seconds": 2},
    )


def models(services: Services) -> Path:
    plugin = plugin_of(services, "nekro.model_store")
    return plugin.get_plugin_data_dir() / "models"


@pytest.fixture
def patient_fleet(make_fleet: Callable[..., Any]) -> Iterator[Any]:
    """Three workers whose leases outlast the pauses of a busy machine; they share the other's database."""
    fleet = make_fleet(downloads={"allow_private": ("127.0.0.0/8",)})
    fleet.start("long", "long", "long", concurrency=4)
    yield fleet
    fleet.stop()


@pytest.fixture
async def patient_services(patient_fleet: Any) -> AsyncIterator[Services]:
    services: Services = patient_fleet.services()
    await services.start()
    yield services
    await services.close()


@pytest.mark.extended
async def test_fifty_callers_on_three_workers_cause_one_download(
    patient_services: Services, serve: Serve
) -> None:
    services = patient_services
    server = serve(CONTENT)
    server.behaviour.pause_seconds = 0.005

    async def ask() -> str:
        envelope = await use_cases.invoke(
            services,
            "download_model",
            (server.url, "shared", server.sha256),
            {},
            chat_key="d",
            user_id=None,
            timeout_seconds=WAIT_SECONDS,
        )
        return envelope.text or ""

    texts = await asyncio.gather(*(ask() for _ in range(50)))
    assert len(server.requests) == 1 and server.sent_bytes == len(CONTENT)
    assert all("downloaded" in text or "already here" in text for text in texts)
    downloaded = models(services) / "shared.model"
    assert hashlib.sha256(downloaded.read_bytes()).hexdigest() == server.sha256
    assert [path.name for path in models(services).iterdir()] == ["shared.model"]


async def killed_half_way(fleet: Any, services: Services, server: RangeServer, *, at: int) -> None:
    """Serve up to an offset, wait until it is recorded on disk, and kill the downloading worker."""

    async def noted() -> bool:
        notes = list(models(services).glob(".*.json"))
        return server.sent_bytes >= at and bool(notes) and f",{at // 2}" not in notes[0].read_text()

    await eventually(noted, what=fleet.waiting_for(f"{at} bytes"))

    async def worker() -> Any:
        async with services.database.read() as tx:
            (call,) = [job for job in await tx.jobs.newest(limit=9, chat_key="k")]
            row = await tx.calls.get(call.id)
        running = [worker for worker in fleet.workers if worker.process.poll() is None]
        node = row.worker or ""
        return next((worker for worker in running if node.endswith(f":{worker.pid}")), None)

    (await eventually(worker, what=fleet.waiting_for("who fetches"))).kill()
    fleet.start("long", concurrency=4)


@pytest.mark.slow
async def test_a_download_whose_worker_is_killed_twice_is_finished_by_the_third(
    fleet: Any, services: Services, serve: Serve
) -> None:
    for worker in fleet.workers:
        if worker.process.poll() is None:
            worker.stop()
    fleet.start("long", concurrency=4)
    server = serve(CONTENT)
    server.behaviour.pause_seconds = 0.03  # twelve mebibytes take six seconds
    report = await use_cases.run_code(
        services,
        f"print(download_model({server.url!r}, 'killed', {server.sha256!r}))",
        chat_key="k",
        user_id=None,
        follow_up=True,
        file_name="k.py",
    )
    assert "is still running, as job" in report.output, report.output
    await killed_half_way(fleet, services, server, at=3 << 20)
    await killed_half_way(fleet, services, server, at=8 << 20)

    async def done() -> bool:
        async with services.database.read() as tx:
            (job,) = await tx.jobs.newest(limit=9, chat_key="k")
        return job.state is JobState.SUCCEEDED

    await eventually(done, what=fleet.waiting_for("the end"))
    async with services.database.read() as tx:
        texts = [message.text for message in await tx.messages.newest("k", limit=9)]
    assert len(texts) == 1 and server.sha256 in texts[0], texts
    assert server.starts[0] == 0 and 0 not in server.starts[1:], server.starts
    assert server.starts == sorted(server.starts) and len(server.starts) == 3
    downloaded = models(services) / "killed.model"
    assert hashlib.sha256(downloaded.read_bytes()).hexdigest() == server.sha256
    assert not list(models(services).glob(".killed*"))
