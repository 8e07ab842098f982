"""File areas below one directory."""

from __future__ import annotations

from pathlib import Path

from nekro_agent import layout
from nekro_agent.files.private_files import make_directory

__all__ = ["LocalAreas"]


class LocalAreas:
    """Implements ``FileAreas``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def uploads_dir(self, chat_key: str) -> Path:
        """Host directory of ``/app/uploads``."""
        return make_directory(layout.uploads_dir(self._root, chat_key), passable=True)

    def shared_dir(self, container_key: str) -> Path:
        """Host directory of ``/app/shared``."""
        return make_directory(layout.shared_dir(self._root, container_key), passable=True)

    def plugin_dir(self, plugin_key: str) -> Path:
        """Directory of a plugin."""
        return make_directory(layout.plugin_dir(self._root, plugin_key))
