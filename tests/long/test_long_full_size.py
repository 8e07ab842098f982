"""Tests of full size: two gibibytes from a server that cuts, a call of many visibility timeouts."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from range_server import Content, Serve
from waiting import WAIT_SECONDS
from worker_fleet import plugin_of

from nekro.app import use_cases
from nekro_agent import runtime
from nekro_agent.downloads.download import fetch
from nekro_agent.runtime import DownloadPolicy
from nekro_agent.testing import InMemoryRuntime

pytestmark = pytest.mark.slow
GIBIBYTE = 1 << 30
CUT_BYTES = 200 * 1000 * 1000
VISIBILITY_SECONDS = 20
JOB_SECONDS = 180


def most_memory() -> int:
    """Peak resident memory of this process so far, server included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def fleet(make_fleet: Callable[..., Any]) -> Any:
    system = make_fleet(broker={"visibility_timeout_seconds": VISIBILITY_SECONDS}, agent={"lease_seconds": 3})
    system.start("long", "long", "methods", concurrency=2)
    return system


@pytest.mark.timeout(900)
@pytest.mark.parametrize("connections", [1, 4])
async def test_two_gibibytes_arrive_once_with_constant_memory(
    serve: Serve, tmp_path: Path, connections: int
) -> None:
    server = serve(Content(2 * GIBIBYTE))
    server.behaviour.cut_after = CUT_BYTES
    policy = DownloadPolicy(allow_private=("127.0.0.0/8",), retry_seconds=0.05, connections=connections)
    world = InMemoryRuntime(data_dir=tmp_path / "data", downloads=policy)
    before = most_memory()
    with runtime.bound(world.runtime):
        result = await fetch(server.url, tmp_path / "model", sha256=server.sha256)
    with result.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == server.sha256
    assert result.size_bytes == 2 * GIBIBYTE
    assert server.starts.count(0) == 1
    assert connections > 1 or len(server.requests) == 2 * GIBIBYTE // CUT_BYTES + 1
    assert most_memory() - before < 128 << 20
    assert [path.name for path in tmp_path.iterdir() if path.name != "data"] == ["model"]


@pytest.mark.timeout(400)
async def test_a_call_of_nine_visibility_timeouts_runs_once(fleet: Any) -> None:
    services = fleet.services()
    await services.start()
    try:
        await use_cases.run_code(
            services, "haul('slowly')", chat_key="vt", user_id=None, follow_up=True, file_name="vt.py"
        )
        plugin = plugin_of(services, "tests.hauler")
        await asyncio.sleep(JOB_SECONDS)
        await plugin.store.set(store_key="go slowly", value="1")
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                async with services.database.read() as tx:
                    delivered = [message.text for message in await tx.messages.newest("vt", limit=9)]
                if delivered:
                    break
                await asyncio.sleep(0.1)
        journal = (plugin.get_plugin_data_dir() / "journal.txt").read_text().splitlines()
    finally:
        await services.close()
    assert delivered == ["hauled slowly"]
    assert len([line for line in journal if line.startswith("haul slowly ")]) == 1
