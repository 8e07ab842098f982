"""Files of areas that sandboxed code shares, and the host files that a text may name.

A path in a text may come from a model. It is admitted if it leads to a file below a directory of this
call: the chat's two areas, the plugin's own directory, the call's staging directories, and files and
directories that the call itself created with ``tempfile``. The rest of the host's temporary directory
belongs to other services, plugins and chats. Neither owner nor creation time distinguishes calls that run
concurrently in one process, so neither is used: CPython announces each name that ``tempfile`` creates by
an audit event (``tempfile.mkstemp``, ``tempfile.mkdtemp``) in the context of the requesting code, and
the call records the name.

The kernel resolves the opened path from a directory that sandboxed code cannot rename, without following
links; the file must be an ordinary one with a single name. Replacing files after the decision therefore
has no effect.

Source: https://docs.python.org/3/library/audit_events.html
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from nekro_agent import layout, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files

__all__ = [
    "OwnFile",
    "copy_in",
    "copy_out",
    "exists",
    "find_file",
    "refuse_links",
    "safe_basename",
    "shared_place",
    "shown",
]

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
            safe_files.info_of(root, relative)


def exists(root: Path, relative: PurePosixPath) -> bool:
    """Whether a regular file or a directory exists there, reached without links."""
    try:
        mode = safe_files.info_of(root, relative).st_mode
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


_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """A file below a directory of the call, by a path without links."""

    directory: Path
    relative: PurePosixPath
    #: User id that must own the file; None where the directory decides.
    owner: int | None = None

    @property
    def path(self) -> Path:
        """The file's path. Another file may exist there by the time the path is opened."""
        return self.directory / self.relative

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading.

        Raises:
            InvalidValueError: a link leads to it, it is not an ordinary file, has a second name or
                belongs to another user.
            FileNotFoundError: it no longer exists.
        """
        with safe_files.open_file(self.directory, self.relative) as file:
            if self.owner is not None and os.fstat(file.fileno()).st_uid != self.owner:
                raise InvalidValueError(f"{self.path.name!r} belongs to another user of the host")
            yield file


def find_file(path: Path, *, directories: Iterable[Path], temporary: Iterable[Path]) -> OwnFile | None:
    """Return the file that ``path`` leads to if it belongs to the call, else None.

    Args:
        directories: directories of the call.
        temporary: paths that the call created with ``tempfile``: files, and directories with their content.
    """
    try:
        if not path.is_file():
            return None
        real = path.resolve()
        for directory in directories:
            base = directory.resolve()
            if real != base and real.is_relative_to(base):
                return OwnFile(directory=base, relative=PurePosixPath(real.relative_to(base)))
        for made in temporary:
            base = made.parent.resolve() / made.name
            if real == base:
                return OwnFile(directory=base.parent, relative=PurePosixPath(base.name), owner=os.geteuid())
            if real.is_relative_to(base):
                return OwnFile(
                    directory=base, relative=PurePosixPath(real.relative_to(base)), owner=os.geteuid()
                )
    except (OSError, RuntimeError):  # not a path, a name that is too long, or a loop of links
        return None
    return None


def shown(text: str) -> str:
    """Quote a path for an error, shortened because it may be content passed by mistake."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
