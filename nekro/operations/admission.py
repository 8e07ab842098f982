"""What is checked before costly work: budgets of keys, bytes that they keep stored, and a worker for code.

A key may have a budget: what the turns that it started may use in a day (UTC). A round checks all budgets
before it asks the model, so that the chat reads why it does not. A key whose own budget is used up gets that
as the answer to its request instead, and nothing is recorded. Stored bytes are checked before a body is read,
and charged before its files are stored.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, BinaryIO, Final

from nekro.app.budgets import day_of
from nekro.app.chats.attachments import Attachment
from nekro.app.chats.files import ChatFiles
from nekro.operations.actor import Identity, RefusedError
from nekro_agent.shared_clock import shared_time
from storage.accounts.spendings import PayingKey
from storage.accounts.stored_bytes import ROW_BYTES, item_of_file, size_of
from storage.states import StoredKind

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "KeyFiles",
    "begin_paying",
    "file_removed",
    "require_budget",
    "require_room",
    "require_rounds_worker",
]


async def require_budget(services: Services, identity: Identity) -> None:
    """Return if the key may start a turn.

    Raises:
        RefusedError: 429, a budget of the day is used up.
    """
    if identity.key_id is None:
        return
    key = PayingKey(
        id=identity.key_id, cost_per_day=identity.cost_per_day, tokens_per_day=identity.tokens_per_day
    )
    now = shared_time()
    for budget in await services.spending.key_budgets(key, day=day_of(now)):
        if budget.is_exhausted and budget.renews_at is not None:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "budget_exceeded",
                budget.used_up,
                headers={"Retry-After": str(math.ceil((budget.renews_at - now).total_seconds()))},
            )


async def begin_paying(services: Services, identity: Identity, account_id: str, *texts: str) -> None:
    """Let the key pay for a run or call, and for the turns that follow from it.

    Args:
        account_id: as ``Invocation.account_id``.
        texts: code or arguments, which are stored with it.

    Raises:
        RefusedError: as from ``require_budget``.
        StorageQuotaError: the key may not store more.
    """
    await require_budget(services, identity)
    if identity.key_id is not None:
        async with services.database.begin() as transaction:
            await transaction.keys.add_turn(identity.key_id, account_id)
            size = ROW_BYTES + size_of(*texts)
            transaction.stored_bytes.add(identity.account_id, StoredKind.CALLS, size)


async def require_room(services: Services, identity: Identity, size: int) -> None:
    """Return if the key may store so many bytes.

    Raises:
        StorageQuotaError: it may not.
    """
    if identity.key_id is not None:
        async with services.database.read() as transaction:
            await transaction.stored_bytes.require_room(identity.key_id, size)


class KeyFiles:
    """Stores files in the uploads of a chat, on the quota of a key."""

    def __init__(self, services: Services, identity: Identity, chat_key: str) -> None:
        """Create it; the chat is created with the first file."""
        self._services, self._key_id, self._chat_key = services, identity.key_id, chat_key

    async def add(self, name: str, source: bytes | BinaryIO, *, numbers: bool = True) -> Attachment:
        """Store a file; for the arguments see ``ChatFiles.add``.

        Raises:
            StorageQuotaError: the key has no room for it; nothing is stored.
            InvalidValueError, UploadQuotaError, ConflictError: as from ``ChatFiles.add``.
        """
        files = await self.open()
        return await self._paid(source, partial(files.add, name, source, numbers=numbers))

    async def put(self, name: str, source: BinaryIO, path: str | None) -> Attachment:
        """Store a file, replacing a file of its name; for the arguments see ``ChatFiles.put``.

        Raises:
            StorageQuotaError: the key has no room for it; nothing is stored.
            UsageError: as from ``ChatFiles.put``.
        """
        files = await self.open()
        return await self._paid(source, partial(files.put, name, source, path), replaces=True)

    async def _paid(
        self, source: bytes | BinaryIO, store: Callable[[], Attachment], *, replaces: bool = False
    ) -> Attachment:
        if self._key_id is None:
            return await asyncio.to_thread(store)
        size = len(source) if isinstance(source, bytes) else os.fstat(source.fileno()).st_size
        async with self._services.database.begin() as transaction:
            reserved = await transaction.stored_bytes.reserve(self._key_id, size + ROW_BYTES)
        try:
            stored = await asyncio.to_thread(store)
        except BaseException:
            async with self._services.database.begin() as transaction:
                await transaction.stored_bytes.release(reserved)
            raise
        async with self._services.database.begin() as transaction:
            item_id = item_of_file(self._chat_key, stored.path)
            if replaces:
                await transaction.stored_bytes.release(item_id)
            await transaction.stored_bytes.settle(reserved, item_id, StoredKind.FILES)
        return stored

    async def open(self) -> ChatFiles:
        """Return the files of the chat."""
        return self._services.files_of(await self._services.chat(self._chat_key))


async def file_removed(services: Services, chat_key: str, path: str) -> None:
    """Give back what a file was charged that is removed."""
    async with services.database.begin() as transaction:
        await transaction.stored_bytes.release(item_of_file(chat_key, path))


_NO_WORKER: Final = (
    "no rounds worker is live, and only these run code; start one with `nekro up --rounds 1` or `nekro worker"
    " --lane rounds`, or without a language model `nekro worker --lane rounds --without-model`"
)


async def require_rounds_worker(services: Services) -> None:
    """Return if a rounds worker is live.

    Raises:
        RefusedError: 503, none is.
    """
    if not await services.remote_runs.have_worker():
        raise RefusedError(
            HTTPStatus.SERVICE_UNAVAILABLE, "no_worker", _NO_WORKER, headers={"Retry-After": "1"}
        )
