"""The lease of a chat, which permits running its rounds: acquired, renewed while held, released.

Every write of a round names the lease's fencing token, so the database refuses a worker that
lost the chat. Effects outside the database (calls of methods) are preceded by ``ensure``, so a
worker that was suspended notices the loss before it acts, not at the next renewal.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from nekro_agent.errors import FencedError
from storage.engine import Database
from workers.leases.keeping import report_loss, survived

__all__ = ["ChatLease"]


class ChatLease:
    """A chat's lease, held for the length of an ``async with`` block."""

    def __init__(self, database: Database, chat_key: str, *, fence: int, lease_seconds: float) -> None:
        self.chat_key = chat_key
        self.fence = fence
        #: Set once the chat passed to another worker.
        self.lost = asyncio.Event()
        self._database = database
        self._lease_seconds = lease_seconds
        self._renewed_at = time.monotonic()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def acquire(
        cls, database: Database, chat_key: str, *, owner: str, lease_seconds: float
    ) -> ChatLease | None:
        """Acquire the lease; None when another worker holds it or the chat does not exist."""
        async with database.autocommit() as transaction:
            fence = await transaction.chats.acquire_lease(chat_key, owner=owner, lease_seconds=lease_seconds)
        if fence is None:
            return None
        return cls(database, chat_key, fence=fence, lease_seconds=lease_seconds)

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep(), name="nekro-chat-lease")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        with survived("chat_lease_not_released", chat_key=self.chat_key):  # it runs out by itself
            async with self._database.autocommit() as transaction:
                await transaction.chats.release_lease(self.chat_key, fence=self.fence)

    async def ensure(self) -> None:
        """Return if this worker certainly holds the chat.

        Raises:
            FencedError: the chat passed to another worker.
            StorageUnavailableError: it may have, and the database does not answer.
        """
        if not self.lost.is_set() and time.monotonic() - self._renewed_at >= self._lease_seconds:
            await self._renew()
        if self.lost.is_set():
            raise FencedError(f"chat {self.chat_key!r} passed to another worker")

    async def _keep(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(self._lease_seconds / 3)
            with survived("chat_lease_not_renewed", chat_key=self.chat_key):
                await self._renew()

    async def _renew(self) -> None:
        asked_at = time.monotonic()
        async with self._database.autocommit() as transaction:
            kept = await transaction.chats.renew_lease(
                self.chat_key, fence=self.fence, lease_seconds=self._lease_seconds
            )
        if kept:
            self._renewed_at = asked_at
        elif not self.lost.is_set():
            report_loss("chat", chat_key=self.chat_key, fence=self.fence)
            self.lost.set()
