"""Ownership of a data directory: one owner, any number of borrowers, no stale record."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import WAIT_SECONDS

from nekro.cli.services.ownership import Ownership, WorkerEntry, read_running, require_running
from nekro_agent.errors import ServiceError, UsageError

Owners = Callable[[], Ownership]
WORKERS = (WorkerEntry(name="methods-1", lane="methods", pid=1),)


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    """Create processes that compete for one data directory."""
    made: list[Ownership] = []

    def make() -> Ownership:
        made.append(Ownership(tmp_path))
        return made[-1]

    yield make
    for ownership in made:
        ownership.release()


def test_only_one_process_owns_the_directory_at_a_time(owners: Owners) -> None:
    first, second = owners(), owners()
    assert first.claim()
    assert not second.claim()
    first.release()
    assert second.claim()
    second.release()


def test_others_read_the_published_record_until_the_owner_withdraws_it(
    owners: Owners, tmp_path: Path
) -> None:
    owner = owners()
    assert read_running(tmp_path) is None
    owner.claim()
    assert read_running(tmp_path) is None
    owner.publish(command="up", workers=WORKERS)
    running = read_running(tmp_path)
    assert running is not None
    assert (running.command, running.workers) == ("up", WORKERS)
    assert running.lanes == {"methods"}
    owner.withdraw()
    assert read_running(tmp_path) is None
    owner.release()


def test_a_record_of_a_killed_owner_is_ignored(owners: Owners, tmp_path: Path) -> None:
    def own() -> None:
        ownership = Ownership(tmp_path)
        ownership.claim()
        ownership.publish(command="up", workers=WORKERS)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=own)
    process.start()
    process.join(WAIT_SECONDS)
    assert process.exitcode == -9
    assert (tmp_path / "run" / "up.json").exists()
    assert read_running(tmp_path) is None
    with pytest.raises(UsageError, match="nekro up"):
        require_running(tmp_path)
    assert owners().claim()


def test_a_broken_record_counts_as_missing(owners: Owners, tmp_path: Path) -> None:
    owner = owners()
    owner.claim()
    (tmp_path / "run" / "up.json").write_text("{", "utf-8")
    assert read_running(tmp_path) is None


async def test_an_owner_waits_for_its_borrowers(owners: Owners) -> None:
    owner, borrower = owners(), owners()
    owner.claim()
    assert not await owner.wait_for_borrowers()
    with borrower.borrow():
        waiting = asyncio.create_task(owner.wait_for_borrowers())
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
    assert await waiting


async def test_a_process_that_comes_during_start_up_waits_until_the_owner_is_ready(owners: Owners) -> None:
    owner, other = owners(), owners()
    owner.claim()
    waiting = asyncio.create_task(other.wait_for_owner(seconds=WAIT_SECONDS))
    await asyncio.sleep(0)
    owner.publish(command="exec", workers=WORKERS)
    running = await waiting
    assert running is not None
    assert running.command == "exec"


async def test_a_waiting_process_gets_an_error_when_the_owner_gives_up(owners: Owners) -> None:
    owner, other = owners(), owners()
    owner.claim()
    waiting = asyncio.create_task(other.wait_for_owner(seconds=WAIT_SECONDS))
    await asyncio.sleep(0)
    owner.release()
    assert await waiting is None
    owner.claim()
    with pytest.raises(ServiceError, match=r"owner\.lock"):
        await other.wait_for_owner(seconds=0)
