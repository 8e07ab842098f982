"""One transaction: its connection, the repositories on it, and what is to happen after the commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from loguru import logger
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["Transaction"]


class Transaction:
    """What ``Database.begin()``, ``autocommit()`` and ``read()`` give; never build one yourself."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self._callbacks: list[Callable[[], Awaitable[object]]] = []

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
