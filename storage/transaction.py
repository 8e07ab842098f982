"""One transaction: its connection, the repositories on it, and what is to happen after the commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property

from loguru import logger
from sqlalchemy.ext.asyncio import AsyncConnection

from storage.calls import CallRepository
from storage.chats import ChatRepository
from storage.jobs import JobRepository
from storage.leases import LeaseRepository
from storage.marks import MethodMarkRepository
from storage.messages import MessageRepository
from storage.rounds import RoundRepository
from storage.timers import CronJobRepository, TimerRepository

__all__ = ["Transaction"]


class Transaction:
    """What ``Database.begin()``, ``autocommit()`` and ``read()`` give; never build one yourself."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._callbacks: list[Callable[[], Awaitable[object]]] = []

    @cached_property
    def calls(self) -> CallRepository:
        """Calls of plugin methods."""
        return CallRepository(self.connection)

    @cached_property
    def chats(self) -> ChatRepository:
        """Chats and the leases on them."""
        return ChatRepository(self.connection)

    @cached_property
    def cron_jobs(self) -> CronJobRepository:
        """Recurring timers."""
        return CronJobRepository(self.connection)

    @cached_property
    def jobs(self) -> JobRepository:
        """Background jobs."""
        return JobRepository(self.connection)

    @cached_property
    def leases(self) -> LeaseRepository:
        """Leases by name."""
        return LeaseRepository(self.connection)

    @cached_property
    def marks(self) -> MethodMarkRepository:
        """Methods sent to another lane."""
        return MethodMarkRepository(self.connection)

    @cached_property
    def messages(self) -> MessageRepository:
        """Messages of chats."""
        return MessageRepository(self.connection)

    @cached_property
    def rounds(self) -> RoundRepository:
        """Rounds of the LLM."""
        return RoundRepository(self.connection)

    @cached_property
    def timers(self) -> TimerRepository:
        """One-time timers."""
        return TimerRepository(self.connection)

    def after_commit(self, callback: Callable[[], Awaitable[object]]) -> None:
        """Run ``callback`` once the transaction is committed; never if it is rolled back.

        Callbacks run in the order given. One that raises is logged and does not undo anything:
        what it was to announce is a row by then, and the sweep finds rows that nobody announced.
        """
        self._callbacks.append(callback)

    async def run_callbacks(self) -> None:
        """Run the callbacks; ``Database.begin`` calls this after the commit."""
        for callback in self._callbacks:
            try:
                await callback()
            except Exception:  # the edge of the transaction: see `after_commit`
                logger.exception("after_commit_callback_failed")
