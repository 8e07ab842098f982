"""The file areas below one directory."""

from __future__ import annotations

from pathlib import Path

from nekro_agent import layout

__all__ = ["LocalAreas"]


class LocalAreas:
    """Implements ``FileAreas``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory behind ``/app/uploads``."""
        return _made(layout.uploads_dir(self._root, chat_key))

    def shared_dir(self, container_key: str) -> Path:
        """Directory behind ``/app/shared``."""
        return _made(layout.shared_dir(self._root, container_key))

    def plugin_dir(self, plugin_key: str) -> Path:
        """Directory of a plugin."""
        return _made(layout.plugin_dir(self._root, plugin_key))


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
