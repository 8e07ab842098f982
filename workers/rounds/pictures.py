"""Loads the pictures of a chat's messages for a prompt, within bounds on their number and size."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from loguru import logger

from agent.model import HistoryImage, HistoryMessage, Part, TextPart
from agent.multimodal import picture_part
from broker_config.settings import Settings
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files
from storage.files.areas import DataAreas

__all__ = ["PictureLoader"]


class PictureLoader:
    """Reads pictures from the uploads of chats."""

    def __init__(self, settings: Settings, areas: DataAreas) -> None:
        self._most = settings.agent.history_images if settings.llm.vision else 0
        self._image_bytes = settings.agent.image_bytes
        self._areas = areas

    async def load(self, chat_key: str, messages: Sequence[HistoryMessage]) -> Sequence[HistoryMessage]:
        """Return the messages, the newest of their pictures with their content."""
        if not self._most or not any(message.images for message in messages):
            return messages
        return await asyncio.to_thread(self._load, chat_key, messages)

    def _load(self, chat_key: str, messages: Sequence[HistoryMessage]) -> list[HistoryMessage]:
        uploads = self._areas.uploads_dir(chat_key)
        left = self._most
        loaded: list[HistoryMessage] = []
        for message in reversed(messages):
            images = list(message.images)
            for index in range(len(images) - 1, max(len(images) - left, 0) - 1, -1):
                images[index] = dataclasses.replace(images[index], part=self._read(uploads, images[index]))
            left -= min(left, len(images))
            loaded.append(dataclasses.replace(message, images=tuple(images)) if images else message)
        return loaded[::-1]

    def _read(self, uploads: Path, image: HistoryImage) -> Part:
        """Return the part that shows a picture, or a text: a bad picture must not fail the round."""
        name = PurePosixPath(image.path).name
        try:
            return picture_part(safe_files.read_file(uploads, name, max_bytes=self._image_bytes))
        except FileNotFoundError:
            return TextPart(text="[left out: the file no longer exists]")
        except (InvalidValueError, OSError) as exc:
            logger.bind(error=str(exc)).warning("picture_not_shown")
            return TextPart(
                text=f"[left out: the file cannot be read, or is larger than {self._image_bytes} bytes]"
            )
