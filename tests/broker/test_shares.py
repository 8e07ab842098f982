"""Limits of one chat: calls in flight, waiting calls, and refusals."""

from __future__ import annotations

import asyncio

import pytest

from nekro.broker.fairness import ChatShares
from nekro_agent.errors import OverloadedError


class Call:
    """A call that keeps its place until its event is set."""

    def __init__(self, shares: ChatShares, chat_key: str) -> None:
        self._shares, self._chat_key = shares, chat_key
        self._end = asyncio.Event()
        self.has_turn = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._shares.turn(self._chat_key):
            self.has_turn = True
            await self._end.wait()

    def end_soon(self) -> None:
        """Release the place in the loop's next iteration."""
        self._end.set()

    async def end(self) -> None:
        self.end_soon()
        await self.task


async def settled() -> None:
    """Let every ready callback run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_each_chat_has_its_places_and_waits_in_order() -> None:
    shares = ChatShares(per_chat=2, waiting=0)
    calls = [Call(shares, "busy") for _ in range(4)]
    other = Call(shares, "other")
    await settled()
    assert [call.has_turn for call in calls] == [True, True, False, False]
    assert other.has_turn
    await calls[1].end()
    await settled()
    assert [call.has_turn for call in calls[2:]] == [True, False]
    for call in (other, calls[0], calls[2], calls[3]):
        await call.end()


async def test_calls_over_the_waiting_limit_are_refused_until_one_leaves() -> None:
    shares = ChatShares(per_chat=1, waiting=1)
    runs, waits = Call(shares, "a"), Call(shares, "a")
    await settled()
    with pytest.raises(OverloadedError, match="1 calls are already waiting"):
        await Call(shares, "a").task
    free = Call(shares, "b")
    await settled()
    assert free.has_turn, "no call of its chat waits"
    waits.task.cancel()
    await settled()
    again = Call(shares, "a")
    await settled()
    assert not again.has_turn
    await runs.end()
    await settled()
    assert again.has_turn
    await again.end()
    await free.end()


async def test_a_free_place_is_taken_although_a_cancelled_waiter_has_not_left() -> None:
    shares = ChatShares(per_chat=1, waiting=1)
    runs, waits = Call(shares, "a"), Call(shares, "a")
    await settled()
    # All three happen in one iteration of the loop, the second one last.
    runs.end_soon()
    third = Call(shares, "a")
    waits.task.cancel()
    await settled()
    assert third.has_turn
    await third.end()
