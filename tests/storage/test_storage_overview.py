"""Figures of open work."""

from __future__ import annotations

from uuid import uuid4

from waiting import WAIT_SECONDS

from storage.engine import Database
from storage.listings.series import OpenWork
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind


async def test_open_work_counts_due_and_running_items(database: Database) -> None:
    async with database.begin() as transaction:
        nothing = await transaction.overview.rounds()
        assert nothing == OpenWork(waiting=0, running=0, oldest_seconds=0)
        for number, (chat, delay) in enumerate((("a", 0), ("b", 0), ("c", 60))):
            await transaction.chats.ensure(chat)
            await transaction.rounds.request(
                RoundRequest(
                    chat_key=chat,
                    trigger_kind=TriggerKind.MANUAL,
                    trigger_id=f"t{number}",
                    delay_seconds=delay,
                )
            )
    async with database.begin() as transaction:
        fence = await transaction.chats.acquire("a", owner="w", lease_seconds=30)
        assert fence is not None
        await transaction.rounds.claim_next("a", fence=fence, worker="w")
    async with database.read() as transaction:
        overview = transaction.overview
        rounds, jobs = await overview.rounds(), await overview.jobs()
    assert (rounds.waiting, rounds.running) == (1, 1)
    assert 0 <= rounds.oldest_seconds < WAIT_SECONDS
    assert jobs == OpenWork(waiting=0, running=0, oldest_seconds=0)


async def test_a_round_behind_its_chats_running_one_waits_for_no_worker(database: Database) -> None:
    """More workers would not start it: its age must raise no alarm and start no worker."""

    async def open_rounds(requested: str = "", claimed: str = "") -> OpenWork:
        async with database.begin() as transaction:
            if requested:
                await transaction.chats.ensure(requested)
                request = RoundRequest(
                    chat_key=requested, trigger_kind=TriggerKind.MANUAL, trigger_id=uuid4().hex
                )
                await transaction.rounds.request(request)
            if claimed:
                fence = await transaction.chats.acquire(claimed, owner="w", lease_seconds=30)
                assert fence is not None
                assert await transaction.rounds.claim_next(claimed, fence=fence, worker="w") is not None
        async with database.read() as transaction:
            return await transaction.overview.rounds()

    assert await open_rounds("a", claimed="a") == OpenWork(waiting=0, running=1, oldest_seconds=0)
    assert await open_rounds("a") == OpenWork(waiting=1, running=1, oldest_seconds=0)
    other = await open_rounds("b")
    assert (other.waiting, other.running) == (2, 1) and other.oldest_seconds > 0
