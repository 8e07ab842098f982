"""Restricts the host files that a text may name to those of the call that received the text.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files

__all__ = ["OwnFile", "find_file", "shown"]

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
