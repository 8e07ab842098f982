"""Polls for requests to stop a running round, once for all rounds that run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nekro.base.tasks import log_errors
from nekro_agent.durations import REFRESH_SECONDS
from storage.engine import Database

__all__ = ["StopRequests"]


class StopRequests:
    """Polls while at least one round is watched; use it on one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watched: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, round_id: str) -> Iterator[asyncio.Event]:
        """Return an event for the length of a block; it is set when the round is asked to stop."""
        asked = self._watched[round_id] = asyncio.Event()
        if self._task is None:
            self._task = asyncio.create_task(self._look_repeatedly(), name="nekro-stop-requests")
        try:
            yield asked
        finally:
            del self._watched[round_id]

    async def _look_repeatedly(self) -> None:
        try:
            await asyncio.sleep(REFRESH_SECONDS)
            while self._watched:
                # An error of the query must not end a round.
                with log_errors("stop_request_not_readable"):
                    await self._look()
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            self._task = None

    async def _look(self) -> None:
        async with self._database.read() as transaction:
            asked = await transaction.rounds.cancel_requested(list(self._watched))
        for round_id in asked & self._watched.keys():
            self._watched[round_id].set()
