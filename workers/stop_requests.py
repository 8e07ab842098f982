"""Requests to stop a running round: looked for once for all rounds that run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from storage.engine import Database
from workers.keeping import survived

__all__ = ["StopRequests"]

#: How often it is looked.
LOOK_SECONDS: Final = 0.3


class StopRequests:
    """Looks for them while there is a round to look for; use it on one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watched: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, round_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set once the round is asked to stop, for the length of a block."""
        asked = self._watched[round_id] = asyncio.Event()
        if self._task is None:
            self._task = asyncio.create_task(self._look_repeatedly(), name="nekro-stop-requests")
        try:
            yield asked
        finally:
            del self._watched[round_id]

    async def _look_repeatedly(self) -> None:
        try:
            await asyncio.sleep(LOOK_SECONDS)
            while self._watched:
                # A round must not end because of the look at it.
                with survived("stop_request_not_readable"):
                    await self._look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._task = None

    async def _look(self) -> None:
        async with self._database.read() as transaction:
            asked = await transaction.rounds.cancel_requested(list(self._watched))
        for round_id in asked & self._watched.keys():
            self._watched[round_id].set()
