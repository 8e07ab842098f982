"""Directories of chats, sandboxes and plugins below the data directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, StorageError
from nekro_agent.tools.private_files import make_directory
from storage.upload_areas import UploadAreas

__all__ = ["DataAreas"]

#: What `ChatRepository.ensure` and `layout.default_container_key` give out, and names of their kind.
_CONTAINER_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.%~-]{0,255}")


class DataAreas:
    """Implements ``nekro_agent.ports.FileAreas``; every directory exists when it is returned."""

    def __init__(self, data_dir: Path, *, uploads: UploadAreas | None = None) -> None:
        """
        Args:
            uploads: names the directories of uploads; None, where there is no database, calls them
                by the chat's encoded key.
        """
        self._root = data_dir.absolute()
        self._uploads = uploads

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory that the chat's sandboxes see, read-only, as ``/app/uploads``."""
        directory = layout.uploads_dir(self._root, chat_key)
        if self._uploads is not None:
            directory = directory.with_name(self._uploads.name(chat_key))
        return _made(directory, passable=True)

    def shared_dir(self, container_key: str) -> Path:
        """Directory that the sandbox sees as ``/app/shared``.

        Raises:
            InvalidValueError: the key is not a plain name. Container keys come from the host
                alone, so another one is a mistake or an attack and gets no directory.
        """
        if not _CONTAINER_KEY.fullmatch(container_key):
            raise InvalidValueError(
                f"container key {container_key[:80]!r} is not a name of up to 256 letters, digits "
                "and the characters _ . % ~ -, beginning with a letter or digit"
            )
        return _made(layout.shared_dir(self._root, container_key), passable=True)

    def plugin_dir(self, plugin_key: str) -> Path:
        """The plugin's own directory."""
        return _made(layout.plugin_dir(self._root, plugin_key))


def _made(directory: Path, *, passable: bool = False) -> Path:
    try:
        return make_directory(directory, passable=passable)
    except OSError as exc:
        raise StorageError(f"cannot create {directory}: {exc.strerror}; check NEKRO_DATA_DIR") from exc
