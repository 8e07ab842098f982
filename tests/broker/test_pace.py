"""Calls with large arguments are delayed in proportion to the time that the chat's previous ones used."""

from __future__ import annotations

import asyncio
import itertools

from nekro.broker.fairness import WAITS, ChatPace


async def begin(pace: ChatPace, chat_key: str, order: list[tuple[str, float]], *, spends: float = 0) -> None:
    await pace.turn(chat_key)
    order.append((chat_key, asyncio.get_running_loop().time()))
    pace.spent(chat_key, spends)


async def test_a_chat_waits_in_proportion_to_its_used_time_and_other_chats_do_not() -> None:
    pace, order = ChatPace(only_beside_others=False), []
    began = asyncio.get_running_loop().time()
    pace.spent("heavy", 0.01)
    await asyncio.gather(begin(pace, "heavy", order), begin(pace, "light", order))
    assert [chat_key for chat_key, _ in order] == ["light", "heavy"]
    assert order[1][1] - began >= WAITS * 0.01 * 0.9


async def test_concurrent_calls_of_one_chat_start_one_after_the_other() -> None:
    pace, order = ChatPace(only_beside_others=False), []
    pace.spent("heavy", 0.002)
    await asyncio.gather(*(begin(pace, "heavy", order, spends=0.002) for _ in range(3)))
    assert all(
        later - earlier >= WAITS * 0.002 * 0.9 for (_, earlier), (_, later) in itertools.pairwise(order)
    )


async def test_a_chat_without_competitors_does_not_wait() -> None:
    pace, order = ChatPace(only_beside_others=True), []
    pace.called("light")
    pace.called("heavy")
    pace.spent("heavy", 60)
    waiting = asyncio.create_task(begin(pace, "heavy", order))
    await asyncio.sleep(0)
    assert order == [], "the other chat was active a moment ago"
    await waiting  # a second without calls, far below the accumulated time
    pace.called("heavy")
    await begin(pace, "heavy", order)
    assert len(order) == 2


async def test_calls_no_longer_than_an_ordinary_one_are_not_counted() -> None:
    """A single chat's calls with 16 KiB of text had waited 8 ms each on an otherwise idle process."""
    pace, order = ChatPace(only_beside_others=False), []
    for _ in range(1000):
        pace.spent("chat", 0.0004)
    assert not pace._free_at
    await begin(pace, "chat", order)
    assert len(order) == 1
