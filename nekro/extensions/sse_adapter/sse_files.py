"""Files of messages: those of the agent are read from the chat's areas, those of people stored there."""

from __future__ import annotations

import asyncio
import base64
import binascii
from http import HTTPStatus
from typing import Any, Final

from loguru import logger

from nekro.app.chats.attachments import attachments_of
from nekro.app.chats.files import ChatFiles
from nekro.app.composition import Services
from nekro.extensions.sse_adapter.sse_events import SentFile
from nekro.extensions.sse_adapter.sse_models import MediaSegment
from nekro.gateway.outgoing import OutgoingHttp, RequestFailedError
from nekro.gateway.problems import ProblemError
from nekro_agent.errors import InvalidValueError, NekroError
from nekro_agent.ports import ChatInfo
from storage.repositories.messages import Message

__all__ = ["SseFiles"]

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
        with files.open(path) as file:
            content = file.read(self._most_bytes + 1)
        if len(content) > self._most_bytes:
            raise InvalidValueError(
                f"{path} has more than {self._most_bytes} bytes (two thirds of NEKRO_GATEWAY__MEDIA_BYTES)"
            )
        return content

    async def store(self, segment: MediaSegment, chat_key: str) -> dict[str, Any]:
        """Store the file of a person's message in the uploads of the chat; returns its segment.

        Raises:
            ProblemError: it has no content, or too much, or cannot be fetched.
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
                raise ProblemError(HTTPStatus.BAD_REQUEST, "file_not_fetched", str(exc)) from exc
        else:
            raise ProblemError(HTTPStatus.BAD_REQUEST, "invalid_request", "a file needs url or base64_url")
        if len(content) > self._most_bytes:
            raise ProblemError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "body_too_large",
                f"a file has more than {self._most_bytes} bytes",
            )
        return content


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise ProblemError(
            HTTPStatus.BAD_REQUEST, "invalid_request", f"base64_url is not Base64: {exc}"
        ) from exc
