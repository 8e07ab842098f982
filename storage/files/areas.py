"""Directories of chats, sandboxes and plugins below the data directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, StorageError
from nekro_agent.files.private_files import make_directory
from storage.files.upload_areas import UploadAreas

__all__ = ["DataAreas"]

#: Matches the keys of `ChatRepository.ensure` and `layout.default_container_key`, and similar plain names.
_CONTAINER_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.%~-]{0,255}")


class DataAreas:
    """Implements ``nekro_agent.ports.FileAreas``; every directory exists when it is returned."""

    def __init__(self, data_dir: Path, *, uploads: UploadAreas | None = None) -> None:
        """
        Args:
            uploads: maps chats to their upload directories; None (without a database) names the
                directories after the encoded chat key.
        """
        self._root = data_dir.absolute()
        self._uploads = uploads

    def uploads_dir(self, chat_key: str) -> Path:
        """Return the directory that is mounted read-only as ``/app/uploads`` in the chat's sandboxes."""
        directory = layout.uploads_dir(self._root, chat_key)
        if self._uploads is not None:
            directory = directory.with_name(self._uploads.name(chat_key))
        return _made(directory, passable=True)

    def shared_dir(self, container_key: str) -> Path:
        """Return the directory that is mounted as ``/app/shared`` in the sandbox.

        Raises:
            InvalidValueError: the key is not a plain name. Only the host creates container keys, so
                any other key is a mistake or an attack.
        """
        if not _CONTAINER_KEY.fullmatch(container_key):
            raise InvalidValueError(
                f"container key {container_key[:80]!r} is not a name of up to 256 letters, digits "
                "and the characters _ . % ~ -, beginning with a letter or digit"
            )
        return _made(layout.shared_dir(self._root, container_key), passable=True)

    def plugin_dir(self, plugin_key: str) -> Path:
        """Return the plugin's own directory."""
        return _made(layout.plugin_dir(self._root, plugin_key))


def _made(directory: Path, *, passable: bool = False) -> Path:
    try:
        return make_directory(directory, passable=passable)
    except OSError as exc:
        raise StorageError(f"cannot create {directory}: {exc.strerror}; check NEKRO_DATA_DIR") from exc
