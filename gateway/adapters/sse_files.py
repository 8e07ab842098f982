"""Files of messages: those of the agent are read from the chat's areas, those of people stored there."""

from __future__ import annotations

import asyncio
import base64
import binascii
import mimetypes
from http import HTTPStatus
from typing import Any, Final

from loguru import logger

from codec.wire import new_id
from gateway.adapters.sse_events import SentFile
from gateway.adapters.sse_models import MediaSegment
from gateway.outgoing import OutgoingHttp, RequestFailedError
from gateway.problems import ProblemError
from nekro_agent.errors import NekroError
from nekro_agent.files import safe_files
from nekro_agent.files.area_access import safe_basename
from nekro_agent.files.uploads import UploadArea
from nekro_agent.policies import UploadPolicy
from nekro_agent.ports import ChatInfo
from nekro_agent.tools.path_convertor import PathLocation, locate
from storage.repositories.messages import Message
from workers.composition import Services

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
        self._areas = services.areas
        self._outgoing = outgoing
        self._most_bytes = services.settings.gateway.sse_file_bytes
        limits = services.settings.uploads
        self._policy = UploadPolicy(chat_bytes=limits.chat_bytes, chat_names=limits.chat_names)

    async def of_message(self, message: Message, chat: ChatInfo) -> tuple[SentFile | None, str | None]:
        """Return a message's file, and the name of one that cannot be sent; None for what there is not."""
        data = message.data or {}
        path = data.get("file_path")
        if not path:
            return None, None
        name = str(data.get("file_name") or path.rpartition("/")[2])
        try:
            content = await asyncio.to_thread(self._read, path, chat)
        except (OSError, NekroError) as exc:
            logger.bind(message_id=message.id, error=str(exc)).warning("adapter_file_not_read")
            return None, name
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        is_image = data.get("file_kind") == "image" or media_type.startswith("image/")
        return SentFile(name=name, media_type=media_type, content=content, is_image=is_image), None

    def _read(self, path: str, chat: ChatInfo) -> bytes:
        location, relative = locate(path)
        if location is PathLocation.UPLOADS:
            root = self._areas.uploads_dir(chat.chat_key)
        else:
            root = self._areas.shared_dir(chat.container_key)
        return safe_files.read_file(root, relative, max_bytes=self._most_bytes)

    async def store(self, segment: MediaSegment, chat_key: str) -> dict[str, Any]:
        """Store the file of a person's message in the uploads of the chat; returns its segment.

        Raises:
            ProblemError: it has no content, or too much, or cannot be fetched.
            UploadQuotaError: the uploads have no space for it.
        """
        content = await self._content(segment)
        default = f"{segment.type}{segment.suffix or ''}"
        name = safe_basename(segment.name or default)
        stored = f"{new_id()[:8]}-{name}"
        area = UploadArea(self._areas.uploads_dir(chat_key), self._policy)
        await asyncio.to_thread(area.put, stored, content)
        return {
            "type": segment.type,
            "text": "",
            "file_name": stored,
            "local_path": None,
            "remote_url": segment.url or None,
        }

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
