"""Host files that a text may name: only those of the call that the text came to.

A path in a text may be a model's. It is admitted where it leads, without links, to a file below a
directory of this call: the chat's two areas, the plugin's own directory, the call's staging
directories, and what the call itself made by ``tempfile``. The rest of the host's temporary
directory belongs to other services, plugins and chats. Neither owner nor time of creation tells
calls apart that run in one process at the same time, so both are left out of the decision: CPython
announces each name that ``tempfile`` makes by an audit event (``tempfile.mkstemp``,
``tempfile.mkdtemp``) in the context of the code that asked for it, and the call keeps the name.

What is opened is walked by the kernel from a directory that no sandboxed code can rename, without
following a link; it must be an ordinary file with one name. So it does not matter what is exchanged
after the decision.

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
from nekro_agent.tools import safe_files

__all__ = ["OwnFile", "find_file", "shown"]

_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """A file below a directory of the call, by a path without links."""

    directory: Path
    relative: PurePosixPath
    #: User who must own the file; None where the directory decides.
    owner: int | None = None

    @property
    def path(self) -> Path:
        """Where it lies. Another file may lie there by the time that the path is opened."""
        return self.directory / self.relative

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open it for reading.

        Raises:
            InvalidValueError: a link leads to it, it is no ordinary file, has a second name or
                belongs to another user.
            FileNotFoundError: it has gone.
        """
        with safe_files.open_file(self.directory, self.relative) as file:
            if self.owner is not None and os.fstat(file.fileno()).st_uid != self.owner:
                raise InvalidValueError(f"{self.path.name!r} belongs to another user of the host")
            yield file


def find_file(path: Path, *, directories: Iterable[Path], temporary: Iterable[Path]) -> OwnFile | None:
    """Return the file that ``path`` leads to when it is one of the call's; None for any other.

    Args:
        directories: below which files are the call's.
        temporary: names that the call made by ``tempfile``: files, and directories with all in them.
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
    except (OSError, RuntimeError):  # no path at all, longer than a name can be, or links in a circle
        return None
    return None


def shown(text: str) -> str:
    """Quote a path for an error; what was meant as content may be long."""
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
