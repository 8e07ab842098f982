"""Open the files of a chat, for commands that need nothing else of a running system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from nekro_agent.ports import ChatInfo

if TYPE_CHECKING:
    from nekro.app.chats.files import ChatFiles

__all__ = ["open_chat_files"]


@contextmanager
def open_chat_files(settings: Settings, chat: ChatInfo) -> Iterator[ChatFiles]:
    """Open the areas of a chat; ``settings`` as the workers have them."""
    from nekro.app.chats.files import ChatFiles
    from storage.files.areas import DataAreas
    from storage.files.upload_areas import UploadAreas

    key = resolve_signing_key(settings).get_secret_value()
    uploads = UploadAreas(settings.database, settings.data_dir, key=key)
    try:
        yield ChatFiles(settings, DataAreas(settings.data_dir, uploads=uploads), chat)
    finally:
        uploads.dispose()
