"""Loads the pictures of a chat's messages for a prompt, within bounds on their number and size."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from loguru import logger

from broker_config.model_groups import Vision, vision_of
from broker_config.settings import Settings
from nekro.agent.model import HistoryImage, HistoryMessage
from nekro.agent.multimodal import picture_part
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files
from storage.files.areas import DataAreas

__all__ = ["PictureLoader"]


class PictureLoader:
    """Reads pictures from the uploads of chats; a prompt's builder decodes them."""

    def __init__(self, settings: Settings, areas: DataAreas) -> None:
        self._settings = settings
        self._most = settings.agent.history_images
        self._file_bytes = settings.agent.image_file_bytes
        self._areas = areas

    def vision(self, group: str | None) -> Vision:
        """Return how the models of a chat's group see; None means ``default``."""
        return vision_of(self._settings, group)

    async def load(
        self, chat_key: str, messages: Sequence[HistoryMessage], *, sees: bool
    ) -> Sequence[HistoryMessage]:
        """Return the messages, the newest of their pictures with their content, the others with a reason.

        Args:
            sees: whether a model of the chat sees images; else no file is read.
        """
        if not any(message.images for message in messages):
            return messages
        if not sees:
            return [_hidden(message, "this model sees no images") for message in messages]
        return await asyncio.to_thread(self._load, chat_key, messages)

    def _load(self, chat_key: str, messages: Sequence[HistoryMessage]) -> list[HistoryMessage]:
        uploads = self._areas.uploads_dir(chat_key)
        left = self._most
        loaded: list[HistoryMessage] = []
        for message in reversed(messages):
            images = list(_hidden(message, f"only the newest {self._most} are").images)
            for index in range(len(images) - 1, max(len(images) - left, 0) - 1, -1):
                images[index] = self._read(uploads, message.images[index])
            left -= min(left, len(images))
            loaded.append(dataclasses.replace(message, images=tuple(images)) if images else message)
        return loaded[::-1]

    def _read(self, uploads: Path, image: HistoryImage) -> HistoryImage:
        """Return a picture with its content or the reason why not: a bad one must not fail the round."""
        name = PurePosixPath(image.path).name
        try:
            content = safe_files.read_file(uploads, name, max_bytes=self._file_bytes)
        except FileNotFoundError:
            return dataclasses.replace(image, hidden="the file no longer exists")
        except (InvalidValueError, OSError) as exc:
            logger.bind(error=str(exc)).warning("picture_not_shown")
            reason = f"the file cannot be read, or is larger than {self._file_bytes} bytes"
            return dataclasses.replace(image, hidden=reason)
        return dataclasses.replace(image, part=picture_part(content))


def _hidden(message: HistoryMessage, reason: str) -> HistoryMessage:
    images = tuple(dataclasses.replace(image, hidden=reason) for image in message.images)
    return dataclasses.replace(message, images=images) if images else message
