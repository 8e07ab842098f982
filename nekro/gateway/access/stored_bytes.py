"""What keys keep stored: checked before a body is read, and charged before its files are stored."""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO

from fastapi import Request

from nekro.app.chats.attachments import Attachment
from nekro.app.chats.files import ChatFiles
from nekro.app.composition import Services
from nekro.gateway.dependencies import identity_of
from nekro.gateway.identity import Identity
from storage.access.stored_bytes import ROW_BYTES, item_of_file
from storage.states import StoredKind

__all__ = ["KeyFiles", "file_removed", "require_room"]


async def require_room(services: Services, request: Request) -> None:
    """Return if the key may store a body of the stated length, before the body is read.

    Raises:
        StorageQuotaError: it may not.
    """
    identity = await identity_of(request)
    if identity.key_id is not None:
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdigit() else 0
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
        if self._key_id is None:
            return await asyncio.to_thread(files.add, name, source, numbers=numbers)
        size = len(source) if isinstance(source, bytes) else os.fstat(source.fileno()).st_size
        async with self._services.database.begin() as transaction:
            reserved = await transaction.stored_bytes.reserve(self._key_id, size + ROW_BYTES)
        try:
            stored = await asyncio.to_thread(files.add, name, source, numbers=numbers)
        except BaseException:
            async with self._services.database.begin() as transaction:
                await transaction.stored_bytes.release(reserved)
            raise
        async with self._services.database.begin() as transaction:
            item_id = item_of_file(self._chat_key, stored.path)
            await transaction.stored_bytes.settle(reserved, item_id, StoredKind.FILES)
        return stored

    async def open(self) -> ChatFiles:
        """Return the files of the chat."""
        return self._services.files_of(await self._services.chat(self._chat_key))


async def file_removed(services: Services, chat_key: str, path: str) -> None:
    """Give back what a file was charged that is removed."""
    async with services.database.begin() as transaction:
        await transaction.stored_bytes.release(item_of_file(chat_key, path))
