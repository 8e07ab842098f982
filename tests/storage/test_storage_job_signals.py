"""Signals of jobs are stored until they are taken, and waits are visible and can be cancelled."""

from __future__ import annotations

import pytest

from nekro_agent.errors import ConflictError
from storage.engine import Database
from storage.repositories.job_log import WaitState
from storage.repositories.jobs import NewJob


@pytest.fixture
async def job_id(database: Database) -> str:
    """An open job."""
    async with database.begin() as tx:
        return (await tx.jobs.add(NewJob(type="t", task_id="1", plugin_key="a.b", chat_key="c"))).id


async def test_early_signal_is_stored_and_taken_once(database: Database, job_id: str) -> None:
    async with database.begin() as tx:
        await tx.job_signals.signal(job_id, key="answer", data={"n": 1})
        await tx.job_signals.signal(job_id, key="answer", data={"n": 2})
        await tx.job_signals.begin(job_id, key="answer", waiter="w")
        assert await tx.job_signals.look(job_id, key="answer", waiter="w") is WaitState.READY
        taken = await tx.job_signals.take(job_id, key="answer", waiter="w")
        assert (taken.state, taken.data) == (WaitState.READY, {"n": 2})
        await tx.job_signals.begin(job_id, key="answer", waiter="w")
        assert (await tx.job_signals.take(job_id, key="answer", waiter="w")).state is WaitState.WAITING


async def test_signal_without_data_is_a_signal(database: Database, job_id: str) -> None:
    async with database.begin() as tx:
        await tx.job_signals.begin(job_id, key="go", waiter="w")
        assert await tx.job_signals.look(job_id, key="go", waiter="w") is WaitState.WAITING
        await tx.job_signals.signal(job_id, key="go", data=None)
        taken = await tx.job_signals.take(job_id, key="go", waiter="w")
        assert (taken.state, taken.data) == (WaitState.READY, None)


async def test_second_wait_replaces_the_first_and_gets_the_signal(database: Database, job_id: str) -> None:
    async with database.begin() as tx:
        await tx.job_signals.begin(job_id, key="k", waiter="first")
        await tx.job_signals.begin(job_id, key="k", waiter="second")
        await tx.job_signals.signal(job_id, key="k", data=1)
        assert (await tx.job_signals.take(job_id, key="k", waiter="first")).state is WaitState.CANCELLED
        await tx.job_signals.end(job_id, key="k", waiter="first")
        assert (await tx.job_signals.take(job_id, key="k", waiter="second")).data == 1


async def test_cancelling_counts_waits_and_keeps_signals(database: Database, job_id: str) -> None:
    async with database.begin() as tx:
        for key in ("a", "b%", "c"):
            await tx.job_signals.begin(job_id, key=key, waiter="w")
        await tx.job_signals.signal(job_id, key="z", data=1)
        assert await tx.job_signals.waiting_keys(job_id) == ["a", "b%", "c"]
        assert await tx.job_signals.cancel(job_id, key="a") == 1
        assert await tx.job_signals.cancel(job_id, key="a") == 0
        assert await tx.job_signals.waiting_keys(job_id, key="c") == ["c"]
        assert await tx.job_signals.cancel(job_id) == 2
        assert await tx.job_signals.look(job_id, key="c", waiter="w") is WaitState.CANCELLED
        await tx.job_signals.begin(job_id, key="z", waiter="w")
        assert (await tx.job_signals.take(job_id, key="z", waiter="w")).data == 1


async def test_end_of_a_job_deletes_its_signals_and_waits(database: Database, job_id: str) -> None:
    async with database.begin() as tx:
        await tx.job_signals.begin(job_id, key="k", waiter="w")
        await tx.job_signals.signal(job_id, key="early", data=1)
        await tx.job_signals.clear(job_id)
        assert await tx.job_signals.look(job_id, key="k", waiter="w") is WaitState.CANCELLED


async def test_unknown_job_cannot_be_signalled(database: Database) -> None:
    with pytest.raises(ConflictError):
        async with database.begin() as tx:
            await tx.job_signals.signal("no such job", key="k", data=1)
