"""Operations of the SDK on areas that sandboxed code shares, on top of ``tools.safe_files``."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from nekro_agent import layout, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files

__all__ = ["copy_in", "copy_out", "exists", "refuse_links", "safe_basename", "shared_place"]

_MAX_NAME_BYTES = 255
#: Far above what a sandbox may write; limits a file that grows while it is copied.
_MAX_COPY_BYTES = 1 << 32


def safe_basename(name: str) -> str:
    """Reduce an untrusted name to a plain file name of at most 255 bytes.

    Leading directories and control characters are removed; a name that is too long is shortened
    before its suffix.

    Raises:
        InvalidValueError: nothing usable is left (``""``, ``"."``, ``".."``, ``"a/"``).
    """
    if not isinstance(name, str):
        raise InvalidValueError(f"a file name must be text, not {type(name).__name__}: {name!r}")
    base = name.replace("\\", "/").rsplit("/", 1)[-1]
    base = "".join(c for c in base if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF).strip()
    if base in ("", ".", ".."):
        raise InvalidValueError(f"{name!r} has no usable file name")
    if len(base.encode()) <= _MAX_NAME_BYTES:
        return base
    suffix = PurePosixPath(base).suffix
    if len(suffix.encode()) > 32:
        suffix = ""
    stem = base[: len(base) - len(suffix)].encode()[: _MAX_NAME_BYTES - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


def refuse_links(root: Path, relative: PurePosixPath) -> None:
    """Raise if a component of ``relative`` is a link; missing components are accepted.

    Raises:
        InvalidValueError: a component is a link, or a parent is not a directory.
    """
    if relative.parts:
        with contextlib.suppress(FileNotFoundError):
            safe_files.mode_of(root, relative)


def exists(root: Path, relative: PurePosixPath) -> bool:
    """Whether a regular file or a directory exists there, reached without links."""
    try:
        mode = safe_files.mode_of(root, relative)
    except (FileNotFoundError, InvalidValueError):
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def shared_place(path: Path) -> tuple[Path, PurePosixPath] | None:
    """Return the shared area that a host path lies in, and the path below it; None if it lies in none.

    The path below is not resolved: sandboxed code may exchange what is there for links at any time.
    """
    path = path.absolute()
    root = layout.shared_root(runtime.data_root()).resolve()
    for area in reversed(path.parents):
        if area.resolve().parent == root:
            return area, PurePosixPath(path.relative_to(area))
    return None


def copy_out(root: Path, relative: PurePosixPath, target: Path) -> None:
    """Copy a file of an area to ``target``, a host path outside of it that must not exist yet.

    Raises:
        InvalidValueError: it is a link, has a second hard link, or is not an ordinary file.
        FileNotFoundError: it does not exist.
    """
    safe_files.copy_out(root, relative, destination=target, max_bytes=_MAX_COPY_BYTES)


def copy_in(root: Path, name: str | PurePosixPath, source: Path | bytes | BinaryIO) -> None:
    """Put a file into an area as ``name``, atomically replacing a file of that name.

    Parent directories of ``name`` are created. A link at that name is replaced, never written through.

    Raises:
        InvalidValueError: a directory of ``name`` is a link.
        IsADirectoryError: ``name`` is a directory.
    """
    if isinstance(source, Path):
        with source.open("rb") as original:
            safe_files.replace_file(root, name, original)
    else:
        safe_files.replace_file(root, name, source)
