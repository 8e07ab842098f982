"""Plugins whose directory has one owner: calls and jobs of real workers on two hosts that share no disk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_process import BUCKET, S3Server
from two_hosts import TwoHosts, two_hosts
from waiting import WAIT_SECONDS, eventually

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.wire.values import decode_value

pytestmark = pytest.mark.extended

KEY = "tests.ledger"
#: A job notes two in a second: long enough to see it and kill its owner.
COUNTED = 40
LANES = ("pinned", "long")


@pytest.fixture
def plugins() -> str:
    """Name of the directory of the plugins."""
    return "owned_plugins"


@pytest.fixture
def hosts(
    tmp_path: Path, redis_url: str, s3_server: Callable[[str], S3Server], plugins: str
) -> Iterator[TwoHosts]:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    variables = s3_server("moto").variables
    more = {"plugins": {"dirs": (Path(__file__).parent / plugins,)}, "agent": {"lease_seconds": 3}}
    with two_hosts(tmp_path, redis_url, url, variables, **more) as hosts:
        yield hosts


@pytest.fixture
async def services(hosts: TwoHosts) -> AsyncIterator[Services]:
    services = hosts.services()
    await services.start()
    yield services
    await services.close()


async def ask(services: Services, method: str, *args: Any, key: str = KEY) -> Any:
    """Call a method for a chat; returns its value."""
    envelope = await use_cases.invoke(
        services, f"{key}.{method}", args, {}, chat_key="test-1", user_id="u", timeout_seconds=WAIT_SECONDS
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


async def start(hosts: TwoHosts, host: str) -> None:
    await asyncio.to_thread(lambda: [hosts.start(host, lane) for lane in LANES])


async def test_a_job_runs_where_the_directory_is_and_goes_on_where_it_goes(
    hosts: TwoHosts, services: Services
) -> None:
    await start(hosts, "a")
    await start(hosts, "b")
    await ask(services, "note", "first")
    owner, *_ = await ask(services, "entries")
    other = "b" if owner == "a" else "a"
    await asyncio.to_thread(hosts.workers[owner, "long"].stop)  # the message comes from the other host
    await ask(services, "count", "one", COUNTED)

    async def has_noted() -> bool:
        return len(await ask(services, "entries")) > 5

    await eventually(has_noted, what=hosts.logs)
    hosts.workers[owner, "pinned"].kill()

    async def has_ended() -> bool:
        async with services.database.read() as tx:
            job = await tx.jobs.find_latest(KEY, "count", "one")
        assert job is not None
        return job.state.is_final

    await eventually(has_ended, what=hosts.logs)
    place, first, *texts = await ask(services, "entries")
    assert (place, first) == (other, "first")
    assert [text.split()[1] for text in texts] == [str(number) for number in range(COUNTED)]
    assert {text.split()[3] for text in texts} == {owner, other}


async def test_a_configuration_that_is_changed_on_one_host_is_used_on_another(
    hosts: TwoHosts, services: Services
) -> None:
    await asyncio.to_thread(hosts.start, "a", "pinned")
    assert await ask(services, "place") == ["nowhere", "nowhere"]
    await services.fleet_hooks.config(KEY, {"PLACE": "Rome"})
    assert await ask(services, "place") == ["nowhere", "Rome"]
    await asyncio.to_thread(hosts.workers["a", "pinned"].stop)
    await asyncio.to_thread(hosts.start, "b", "pinned")
    assert await ask(services, "place") == ["Rome", "Rome"], "also while plugins are imported"


async def test_plugins_share_a_database_on_one_host_and_then_on_another(
    hosts: TwoHosts, services: Services
) -> None:
    for host in "ab":
        await asyncio.to_thread(hosts.start, host, "pinned")
    owner, *_ = await ask(services, "first_add", "1", key="tests.first_tables")
    assert await ask(services, "second_add", "2", key="tests.second_tables") == [owner, "1", "2"]
    await asyncio.to_thread(hosts.workers[owner, "pinned"].stop)
    other = "b" if owner == "a" else "a"
    assert await ask(services, "first_add", "3", key="tests.first_tables") == [other, "1", "2", "3"]
    assert await ask(services, "second_add", "4", key="tests.second_tables") == [other, "1", "2", "3", "4"]


@pytest.mark.parametrize("plugins", ["opened_plugins"])
async def test_a_database_that_was_opened_at_import_loses_nothing_when_its_owner_changes(
    hosts: TwoHosts, services: Services
) -> None:
    for host in "ab":
        await asyncio.to_thread(hosts.start, host, "pinned")
    owner, *_ = await ask(services, "add", "1", key="tests.opened")
    other = "b" if owner == "a" else "a"
    waits = hosts.workers[other, "pinned"].process
    await asyncio.to_thread(hosts.workers[owner, "pinned"].stop)
    # It has opened an older file: `nekro up` starts it again when it has ended.
    assert await asyncio.to_thread(waits.wait, WAIT_SECONDS) == 0, hosts.logs()
    await asyncio.to_thread(hosts.start, other, "pinned")
    assert await ask(services, "add", "2", key="tests.opened") == [other, "1", "2"]
    await asyncio.to_thread(hosts.workers[other, "pinned"].kill)
    await asyncio.to_thread(hosts.start, other, "pinned")
    assert await ask(services, "add", "3", key="tests.opened") == [other, "1", "2", "3"]
