"""A loop that waits for one call goes round as long as that may pay, and no longer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from counting_selector import CountingSelector

from broker_config import busy_poll
from broker_config.busy_poll import BusyPoll, processors

#: Longer than anything here takes, and shorter.
LONG, SHORT = 30.0, 0.01


class Sleeps:
    """Looks whether the running loop sleeps."""

    def __init__(self, selector: CountingSelector) -> None:
        self._selector = selector

    async def now(self) -> bool:
        """Whether it sleeps in the next moments."""
        await asyncio.sleep(0)
        before = self._selector.sleeps
        await asyncio.sleep(0.05)
        return self._selector.sleeps > before


def run(test: Callable[[Sleeps], Coroutine[Any, Any, None]]) -> None:
    """Run a test on a loop whose sleeps are counted."""
    selector = CountingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(test(Sleeps(selector)))


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(busy_poll, "processors", lambda: 2)


def test_a_loop_does_not_sleep_while_one_call_is_under_way() -> None:
    async def test(sleeps: Sleeps) -> None:
        poll = BusyPoll(LONG)
        assert await sleeps.now()
        poll.began(under_way=1)
        assert not await sleeps.now()
        poll.stop()
        assert await sleeps.now()

    run(test)


def test_it_sleeps_when_its_time_is_over_and_without_any() -> None:
    async def test(sleeps: Sleeps) -> None:
        BusyPoll(0).began(under_way=1)
        assert await sleeps.now()
        BusyPoll(SHORT).began(under_way=1)
        await asyncio.sleep(2 * SHORT)
        assert await sleeps.now()

    run(test)


def test_it_sleeps_while_several_calls_are_under_way_or_none_is_waited_for() -> None:
    async def test(sleeps: Sleeps) -> None:
        poll = BusyPoll(LONG)
        for others in (2, 0):
            poll.began(under_way=1)
            poll.began(under_way=others)
            assert await sleeps.now()
        poll.began(under_way=1)
        assert not await sleeps.now()

    run(test)


def test_it_sleeps_after_a_call_that_took_longer_until_one_is_answered_in_time() -> None:
    async def test(sleeps: Sleeps) -> None:
        poll = BusyPoll(LONG)
        poll.ended(after_seconds=LONG + 1)
        poll.began(under_way=1)
        assert await sleeps.now()
        poll.ended(after_seconds=LONG)
        poll.began(under_way=1)
        assert not await sleeps.now()

    run(test)


def test_it_sleeps_where_others_need_its_only_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "processors", lambda: 1)

    async def test(sleeps: Sleeps) -> None:
        BusyPoll(LONG).began(under_way=1)
        assert await sleeps.now()

    run(test)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("max 100000", 4),
        ("900000 100000", 4),
        ("", 4),
        (None, 4),
    ],
)
def test_a_container_has_the_processors_of_its_share(
    share: str | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cpu_max = tmp_path / "cpu.max"
    if share is not None:
        cpu_max.write_text(share)
    assert processors(cpu_max) == expected
