"""The stream of one connection of a client of the SSE adapter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from loguru import logger

from nekro.app.chats.adapters import SSE_ADAPTER
from nekro.app.composition import Services
from nekro.base.tasks import log_errors
from nekro.extensions.sse_adapter.sse_events import WireEvent, message_events, request_event, wire_event
from nekro.extensions.sse_adapter.sse_files import SseFiles
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import StorageError
from storage.outbound.adapters import AdapterSend

__all__ = ["ANSWER_SECONDS", "ClientStream"]

#: As in Nekro Agent, whose clients take a longer silence for a lost connection.
_HEARTBEAT_SECONDS: Final = 5.0
#: A gateway that does not renew its stream, which each heartbeat does, in this time has ended.
_LEASE_SECONDS: Final = 4 * _HEARTBEAT_SECONDS
#: A request without an answer is sent again after this time, up to this number of times.
ANSWER_SECONDS: Final = 30.0
_ATTEMPTS: Final = 10
#: Requests taken at a time; each may have a file.
_BATCH: Final = 8


class ClientStream:
    """What one connection of a client receives; a later connection of the client ends it."""

    def __init__(
        self, services: Services, files: SseFiles, client_id: str, *, stopping: asyncio.Event
    ) -> None:
        """Create the stream; ``events`` begins it.

        Args:
            stopping: set when the gateway stops; the stream then ends, and the client connects elsewhere.
        """
        self._services, self._files, self._client_id = services, files, client_id
        self._stopping = stopping
        self._database = services.database
        self._fence = 0
        self._beaten_at = 0.0

    async def events(self) -> AsyncIterator[WireEvent]:
        """Yield events until a later connection takes over or the gateway stops.

        Closing the iterator releases the stream.
        """
        async with self._database.begin() as transaction:
            self._fence = await transaction.adapters.connect(
                self._client_id, owner=self._services.node, lease_seconds=_LEASE_SECONDS
            )
        try:
            yield wire_event("connected", {"client_id": self._client_id, "timestamp": int(time.time())})
            while not self._stopping.is_set():
                if time.monotonic() - self._beaten_at >= _HEARTBEAT_SECONDS:
                    self._beaten_at = time.monotonic()
                    if not await self._keep():
                        return
                    yield wire_event("heartbeat", {"timestamp": int(time.time())})
                sends = await self._due()
                for send in sends:
                    with log_errors("adapter_send_not_written", send_id=send.id):  # it is tried again later
                        async for event in self._written(send):
                            yield event
                if not sends:
                    await self._pause()
        finally:
            await asyncio.shield(self._release())

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), REFRESH_SECONDS)

    async def _keep(self) -> bool:
        """Renew the stream; False if a later connection has it. An outage of the database does not end it."""
        try:
            async with self._database.begin() as transaction:
                await transaction.adapters.give_up(
                    adapter_key=SSE_ADAPTER, attempts=_ATTEMPTS, error="no client answered"
                )
                return await transaction.adapters.renew(
                    self._client_id, self._fence, lease_seconds=_LEASE_SECONDS
                )
        except StorageError as exc:
            logger.bind(client_id=self._client_id, error=str(exc)).warning("adapter_stream_not_renewed")
            return True

    async def _due(self) -> list[AdapterSend]:
        try:
            async with self._database.read() as transaction:
                if not await transaction.adapters.has_due(self._client_id, adapter_key=SSE_ADAPTER):
                    return []
            async with self._database.begin() as transaction:
                return await transaction.adapters.take_due(
                    self._client_id,
                    self._fence,
                    adapter_key=SSE_ADAPTER,
                    answer_seconds=ANSWER_SECONDS,
                    limit=_BATCH,
                )
        except StorageError as exc:
            logger.bind(client_id=self._client_id, error=str(exc)).warning("adapter_sends_not_read")
            return []

    async def _written(self, send: AdapterSend) -> AsyncIterator[WireEvent]:
        if send.message_id is None:
            yield request_event(send.event, send.id, send.data or {})
            return
        async with self._database.read() as transaction:
            message = await transaction.messages.find(send.message_id)
            chat = await transaction.chats.find(message.chat_key) if message is not None else None
        if message is None or chat is None:  # retention deleted it
            async with self._database.begin() as transaction:
                await transaction.adapters.refuse(
                    send.id, client_id=self._client_id, error="the message is deleted", attempts=0,
                    pause_seconds=0,
                )  # fmt: skip
            return
        file, lost = await self._files.of_message(message, chat)
        for event in message_events(message, channel_name=chat.channel_name, file=file, lost_file=lost):
            yield event

    async def _release(self) -> None:
        try:
            async with self._database.begin() as transaction:
                await transaction.adapters.disconnect(self._client_id, self._fence)
        except StorageError as exc:  # the next connection takes it anyway
            logger.bind(client_id=self._client_id, error=str(exc)).warning("adapter_stream_not_released")
