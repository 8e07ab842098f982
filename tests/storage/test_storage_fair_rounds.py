"""Waiting rounds start in a fair order: whoever requests thousands does not delay the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from storage.engine import Database
from storage.repositories.rounds import Round, RoundReport, RoundRequest
from storage.states import TriggerKind, account_of_key


async def ask(database: Database, *names: str, key: str | None = None, **values: Any) -> list[Round]:
    """Request a round per name, each in a chat of that name."""
    account = None if key is None else account_of_key(key)
    requested = []
    async with database.begin() as tx:
        for name in names:
            await tx.chats.ensure(name)
            request = RoundRequest(
                chat_key=name,
                trigger_kind=TriggerKind.MESSAGE,
                trigger_id=values.pop("trigger_id", name),
                account_id=account,
                **values,
            )
            requested.append((await tx.rounds.request(request))[0])
    return requested


async def start(database: Database, announced: str = "") -> tuple[str, int] | None:
    """Start the round that is next; returns its chat and the fencing token."""
    async with database.autocommit() as tx:
        taken = await tx.chats.acquire_next(announced, owner="w", lease_seconds=60)
    if taken is not None:
        chat_key, fence = taken
        async with database.begin() as tx:
            assert await tx.rounds.claim_next(chat_key, fence=fence, worker="w") is not None
    return taken


async def order(database: Database, count: int) -> list[str]:
    """Start so many rounds; returns their chats."""
    taken = [await start(database) for _ in range(count)]
    return [chat_key for chat_key, _ in filter(None, taken)]


@pytest.mark.parametrize("served", [0, 5])
async def test_an_owner_without_waiting_rounds_is_next(database: Database, served: int) -> None:
    flood = [f"flood{number}" for number in range(20)]
    await ask(database, *flood, key="greedy")
    assert await order(database, served) == flood[:served]
    await ask(database, "mine")
    await ask(database, "yours", key="modest")
    # A round of the flood with the same position was requested earlier.
    assert await order(database, 3) == [flood[served], "mine", "yours"]
    assert await order(database, 99) == flood[served + 1 :]
    assert await start(database) is None


async def test_owners_with_many_waiting_rounds_take_turns(database: Database) -> None:
    await ask(database, *(f"a{number}" for number in range(6)), key="a")
    assert await order(database, 2) == ["a0", "a1"]
    await ask(database, *(f"b{number}" for number in range(3)), key="b")
    await ask(database, "chat")
    assert await order(database, 8) == ["a2", "b0", "chat", "a3", "b1", "a4", "b2", "a5"]


async def test_chats_without_a_key_start_in_the_order_of_their_requests(database: Database) -> None:
    await ask(database, "first", "second", "third")
    for number in range(4):
        await ask(database, "first", trigger_id=f"more{number}")
    await ask(database, "fourth")
    assert await order(database, 9) == ["first", "second", "third", "fourth"]


async def test_a_later_round_of_a_turn_starts_before_its_keys_backlog(database: Database) -> None:
    turn, *_ = await ask(database, *(f"flood{number}" for number in range(9)), key="greedy")
    taken = await start(database)
    assert taken is not None
    async with database.begin() as tx:
        await tx.rounds.finish(turn.id, fence=taken[1], report=RoundReport())
        await tx.chats.release(turn.chat_key, fence=taken[1])
    await ask(database, turn.chat_key, trigger_id="result", turn_id=turn.id, number=2)
    assert await order(database, 3) == ["flood1", "flood0", "flood2"]


async def test_a_chat_that_is_held_or_not_due_is_passed_over(database: Database) -> None:
    await ask(database, "held", "free")
    await ask(database, "later", delay_seconds=600)
    async with database.autocommit() as tx:
        fence = await tx.chats.acquire("held", owner="another", lease_seconds=60)
        assert fence is not None
    assert await order(database, 3) == ["free"]
    async with database.begin() as tx:
        await tx.chats.release("held", fence=fence)
    assert await order(database, 3) == ["held"]


async def test_an_announced_chat_whose_worker_died_comes_first(
    database: Database, let_leases_run_out: Any
) -> None:
    await ask(database, "orphan")
    assert await order(database, 1) == ["orphan"]
    await ask(database, *(f"flood{number}" for number in range(3)), key="greedy")
    await let_leases_run_out()
    async with database.autocommit() as tx:
        assert await tx.chats.acquire_next("orphan", owner="w", lease_seconds=60) == ("orphan", 2)
    assert await order(database, 9) == ["flood0", "flood1", "flood2"]


async def test_workers_that_look_at_the_same_time_start_each_round_once(database: Database) -> None:
    chats = [f"chat{number}" for number in range(24)]
    await ask(database, *chats)
    taken = await asyncio.gather(*(start(database) for _ in range(30)))
    assert sorted(pair[0] for pair in taken if pair is not None) == sorted(chats)


async def test_a_chat_whose_row_is_locked_is_waited_for(database: Database) -> None:
    if database.is_sqlite:
        pytest.skip("SQLite has no row locks")
    await ask(database, "busy", "another")
    async with asyncio.timeout(WAIT_SECONDS):
        async with database.begin() as tx:
            await tx.chats.lock("busy")
            assert await asyncio.create_task(start(database)) == ("another", 1)
            looking = asyncio.create_task(start(database))
            await asyncio.wait([looking], timeout=0.2)
            assert not looking.done()
        assert await looking == ("busy", 1)
