"""Calls with large arguments wait for several times what the chat's last ones took on the loop."""

from __future__ import annotations

import asyncio
import itertools

from workers.loop_share import LoopShare


async def test_a_chat_waits_in_proportion_to_what_it_spent_and_another_chat_does_not() -> None:
    share, order = LoopShare(), []
    share.spent("heavy", 0.05)

    async def begin(chat_key: str) -> None:
        await share.turn(chat_key)
        order.append(chat_key)

    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        group.create_task(begin("heavy"))
        group.create_task(begin("light"))
    assert order == ["light", "heavy"]
    assert loop.time() - began >= 4 * 0.05 * 0.9


async def test_calls_that_wait_beside_each_other_begin_one_after_the_other() -> None:
    share, began = LoopShare(), []
    share.spent("heavy", 0.01)

    async def work() -> None:
        await share.turn("heavy")
        began.append(asyncio.get_running_loop().time())
        share.spent("heavy", 0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(work())
    assert all(later - earlier >= 4 * 0.01 * 0.9 for earlier, later in itertools.pairwise(began))
