"""The time of code that runs outside of rounds."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nekro.app.budgets.limits import day_of
from nekro.app.budgets.spending import Spending
from nekro.base.tasks import complete
from nekro_agent.errors import SandboxError
from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from storage.access.spendings import NewSpending, user_scope

__all__ = ["RunMeter", "RunTime"]


@dataclass(kw_only=True)
class RunTime:
    """How long code ran; None: it was stopped before that was known."""

    seconds: float | None = None


class RunMeter:
    """Counts runs of code; one instance per process.

    Args:
        wall_seconds: longest run.
    """

    def __init__(self, spending: Spending, *, wall_seconds: float) -> None:
        self._spending = spending
        self._wall_seconds = wall_seconds

    @asynccontextmanager
    async def running(self, run_id: str, *, chat: ChatInfo, user_id: str | None) -> AsyncIterator[RunTime]:
        """Count the time of the block, which runs code and sets ``seconds``; the key that started it pays.

        Raises:
            BudgetExceededError: a budget is used up; nothing runs.
        """
        entry = NewSpending(
            id=f"run:{run_id}",
            day=day_of(shared_time()),
            chat_key=chat.chat_key,
            user_id=user_scope(chat.adapter_key, user_id),
            sandbox_seconds=self._wall_seconds,
        )
        key = await self._spending.paying_key(run_id)
        reservation = await self._spending.reserve(entry, key=key)
        began = time.monotonic()
        measured = RunTime()
        try:
            yield measured
        except SandboxError:
            measured.seconds = 0.0  # it did not run
            raise
        finally:
            seconds = time.monotonic() - began if measured.seconds is None else measured.seconds
            await complete(self._spending.settle_with_retries(reservation, [], sandbox_seconds=seconds))
