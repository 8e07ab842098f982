"""The console's files, as the package has them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["INDEX", "ConsoleFile", "find_file"]

INDEX: Final = "index.html"
_DIRECTORY: Final = Path(__file__).parent / "static"
#: Types that are served; a file with another suffix is not.
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, kw_only=True)
class ConsoleFile:
    """A file, as it is sent."""

    content: bytes
    media_type: str
    etag: str


def find_file(name: str) -> ConsoleFile | None:
    """Return a file by its path below the static directory; None if there is none.

    Files are compared with the names that the directory has, so no path leads out of it.
    """
    path = _names().get(name)
    if path is None:
        return None
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return None  # removed since


@functools.cache
def _names() -> dict[str, Path]:
    found = [path for path in _DIRECTORY.rglob("*") if path.suffix in _TYPES and path.is_file()]
    return {path.relative_to(_DIRECTORY).as_posix(): path for path in found if not path.is_symlink()}


@functools.lru_cache(maxsize=512)
def _read(path: Path, _modified_ns: int) -> ConsoleFile:
    """Read a file; again when it has changed, which happens while the console is developed."""
    content = path.read_bytes()
    # Of the content, so that all gateways of a release agree.
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return ConsoleFile(content=content, media_type=_TYPES[path.suffix], etag=etag)
