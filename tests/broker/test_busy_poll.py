"""A loop that is kept awake goes round, as long as it was told and no longer."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest

from broker_config.busy_poll import BusyPoll


class Selector(selectors.DefaultSelector):
    """Counts how often its loop slept."""

    sleeps = 0

    def select(self, timeout: float | None = None) -> Any:
        self.sleeps += timeout is None or timeout > 0
        return super().select(timeout)


@pytest.mark.parametrize(("seconds", "how"), [(30.0, "for as long"), (0.0, "never"), (0.01, "until then")])
def test_a_loop_does_not_sleep_while_it_stays_awake(seconds: float, how: str) -> None:
    selector = Selector()

    async def main() -> None:
        poll = BusyPoll(seconds)
        poll.stay_awake()
        before = selector.sleeps
        await asyncio.sleep(0.05)
        if how == "for as long":
            assert selector.sleeps == before
            poll.end()
            await asyncio.sleep(0.05)
        assert selector.sleeps > before

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main())
