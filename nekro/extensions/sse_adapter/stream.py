"""The stream of one connection of a client, the events that it sends, and the files of messages.

Files of the agent are read from the chat's areas, those of people are stored there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from loguru import logger

from nekro.app.chats.attachments import attachments_of
from nekro.app.chats.files import ChatFiles
from nekro.app.services import Services
from nekro.base.tasks import log_errors
from nekro.extensions.sse_adapter import SSE_ADAPTER
from nekro.extensions.sse_adapter.models import MediaSegment
from nekro.gateway.outgoing import OutgoingHttp, RequestFailedError
from nekro.operations.actor import RefusedError
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import NekroError, StorageError
from nekro_agent.layout import channel_of
from nekro_agent.ports import ChatInfo
from storage.adapters import MESSAGE_EVENT, AdapterSend
from storage.repositories.messages import Message

__all__ = [
    "ANSWER_SECONDS",
    "ClientStream",
    "SentFile",
    "SseFiles",
    "message_events",
    "request_event",
    "wire_event",
]


WireEvent = dict[str, str]

#: Characters of Base64 text in one event; a multiple of 4, so that each part is decodable.
_CHUNK_CHARS: Final = 64 << 10
#: Larger files are sent in parts, because clients limit the length of a line.
_MOST_INLINE_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file of a message."""

    name: str
    media_type: str
    content: bytes
    is_image: bool


def wire_event(event: str, data: Mapping[str, Any]) -> WireEvent:
    """Return one Server-Sent Event; its data is one line of JSON, in ASCII.

    A message may contain lone surrogates, which UTF-8 does not have.
    """
    return {"event": event, "data": json.dumps(data, separators=(",", ":"))}


def request_event(event: str, request_id: str, data: Mapping[str, Any]) -> WireEvent:
    """Return a request; the client answers it with the command ``response``."""
    return wire_event(event, {"request_id": request_id, "data": data})


def message_events(
    message: Message, *, channel_name: str | None, file: SentFile | None, lost_file: str | None
) -> Iterator[WireEvent]:
    """Yield the events that send a message; the client confirms the last one that has the request's id.

    Args:
        file: its file; None if it has none.
        lost_file: name of its file if that cannot be sent.
    """
    channel_id = channel_of(message.chat_key).channel_id or message.chat_key
    segments: list[dict[str, Any]] = []
    if message.text:
        segments.append({"type": "text", "content": message.text})
    if lost_file is not None:
        segments.append({"type": "text", "content": f"[the file {lost_file} cannot be sent]"})
    is_large = file is not None and len(file.content) > _MOST_INLINE_BYTES
    if file is not None and not is_large:
        segments.append(_media(file))
    if segments or file is None:
        # A message that is followed by parts of a file is confirmed with the file.
        data = {"channel_id": channel_id, "channel_name": channel_name, "segments": segments}
        yield request_event(MESSAGE_EVENT, "" if is_large else message.id, data)
    if file is not None and is_large:
        yield from _chunks(message.id, channel_id, file)


def _media(file: SentFile) -> dict[str, Any]:
    return {
        "type": "image" if file.is_image else "file",
        "url": None,
        "base64_url": f"data:{file.media_type};base64,{base64.b64encode(file.content).decode()}",
        "name": file.name,
        "size": len(file.content),
        "mime_type": file.media_type,
        "suffix": f".{file.name.rpartition('.')[2]}" if "." in file.name else "",
    }


def _chunks(request_id: str, channel_id: str, file: SentFile) -> Iterator[WireEvent]:
    text = base64.b64encode(file.content).decode()
    count = math.ceil(len(text) / _CHUNK_CHARS)
    for index in range(count):
        part = text[index * _CHUNK_CHARS : (index + 1) * _CHUNK_CHARS]
        data = {
            "chunk_id": request_id,
            "chunk_index": index,
            "total_chunks": count,
            "chunk_data": part,
            "chunk_size": len(part),
            "total_size": len(file.content),
            "mime_type": file.media_type,
            "filename": file.name,
            "file_type": "image" if file.is_image else "file",
            "channel_id": channel_id,
        }
        # Clients confirm every part that has an id; the file is complete with the last one.
        yield request_event("file_chunk", request_id if index == count - 1 else "", data)
    done = {"chunk_id": request_id, "success": True, "message": f"{file.name} is complete"}
    yield request_event("file_chunk_complete", "", done)


#: Longest download of a file that a client names by its address; the client waits for the answer.
_FETCH_SECONDS: Final = 30.0


class SseFiles:
    """The files of the chats of one gateway."""

    def __init__(self, services: Services, outgoing: OutgoingHttp) -> None:
        """
        Args:
            outgoing: fetches files that a client names by URL.
        """
        self._services = services
        self._outgoing = outgoing
        self._most_bytes = services.settings.gateway.sse_file_bytes

    async def of_message(self, message: Message, chat: ChatInfo) -> tuple[SentFile | None, str | None]:
        """Return a message's file, and the name of one that cannot be sent; None for what there is not."""
        file = next(iter(attachments_of(message.data)), None)
        if file is None:
            return None, None
        try:
            content = await asyncio.to_thread(self._read, self._services.files_of(chat), file.path)
        except (OSError, NekroError) as exc:
            logger.bind(message_id=message.id, error=str(exc)).warning("adapter_file_not_read")
            return None, file.name
        is_image = file.kind == "image"
        return SentFile(name=file.name, media_type=file.media_type, content=content, is_image=is_image), None

    def _read(self, files: ChatFiles, path: str) -> bytes:
        with files.open(path, most_bytes=self._most_bytes) as opened:  # two thirds of the limit of messages
            return opened.file.read(self._most_bytes)

    async def store(self, segment: MediaSegment, chat_key: str) -> dict[str, Any]:
        """Store the file of a person's message in the uploads of the chat; returns its segment.

        Raises:
            RefusedError: it has no content, or too much, or cannot be fetched.
            InvalidValueError, UploadQuotaError: as from ``ChatFiles.add``.
        """
        content = await self._content(segment)
        name = segment.name or f"{segment.type}{segment.suffix or ''}"
        files = self._services.files_of(await self._services.chat(chat_key))
        stored = await asyncio.to_thread(files.add, name, content)
        return {**stored.segment, "remote_url": segment.url or None}

    async def _content(self, segment: MediaSegment) -> bytes:
        if segment.base64_url:
            content = await asyncio.to_thread(_decoded, segment.base64_url)
        elif segment.url:
            try:
                content = await self._outgoing.get(
                    segment.url, most_bytes=self._most_bytes, seconds=_FETCH_SECONDS
                )
            except RequestFailedError as exc:
                raise RefusedError(HTTPStatus.BAD_REQUEST, "file_not_fetched", str(exc)) from exc
        else:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "invalid_request", "a file needs url or base64_url")
        if len(content) > self._most_bytes:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "body_too_large",
                f"a file has more than {self._most_bytes} bytes",
            )
        return content


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, "invalid_request", f"base64_url is not Base64: {exc}"
        ) from exc


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
