"""The originals of files that the code is about to change, in a directory of its run.

Of a file that is appended to the size is kept, of one that is removed or replaced a hard link, else a copy.
The index gets one line per path before the change, so it is complete whenever the process is killed. A line
is JSON: ``["path", "kind", size, mode, modified ns, "saved name or target", is upgrade]``.
"""

from __future__ import annotations

import os
import stat
from _json import encode_basestring_ascii
from itertools import count

__all__ = ["APPEND", "MOST_RECORDS", "REMOVE", "WRITE", "Originals"]

#: Smaller files are copied before they are appended to: a file in append mode can be shortened unseen.
SMALL_BYTES = 16 << 10
#: Of a larger one, so many bytes at its end are kept, which show whether it was shortened and grew again.
TAIL_BYTES = 32
#: As on the host.
MOST_RECORDS, MOST_INDEX_BYTES = 20_000, 4 << 20
CHUNK_BYTES = 1 << 20
#: How a path will change: the file gets longer, anything in it may change, or the name leads elsewhere.
APPEND, WRITE, REMOVE = range(3)


class Saved:
    """What is known of the original of a path."""

    def __init__(self, kind: str, size: int, inode: int) -> None:
        #: ``size`` or ``link`` when a further change may need more than was saved; else ``""``.
        self.kind = kind
        self.size = size
        self.inode = inode


class Originals:
    """What is saved of one run."""

    def __init__(self, root: str, directory: str, most_bytes: int) -> None:
        """Begin to save.

        Args:
            root: the shared files.
            directory: of what is saved; made at the first change.
            most_bytes: of all copies.
        """
        self._root, self._directory = root, directory
        self._last_name = ""
        self._saved: dict[str, Saved] = {}
        self._bytes_left, self._index_bytes = most_bytes, 0
        self._numbers = count()
        self._index = -1
        self._index_inode = 0
        #: Whether no other process changes files: one could write into a file that was linked, not copied.
        self.is_alone = True

    @property
    def paths(self) -> list[str]:
        """The canonical paths that have an original."""
        return list(self._saved)

    def has(self, path: str, *, appends: bool) -> bool:
        """Whether nothing is to be saved before a file is changed, or becomes longer."""
        saved = self._saved.get(path)
        return saved is not None and (not saved.kind or (saved.kind == "size" and appends))

    def refuse(self) -> None:
        """Note that the program cannot be run again."""
        self._write("", "!", 0, 0, 0, "")

    def save(self, path: str, change: int) -> bool:
        """Save what a change may need; False if the path is of no file that can be saved.

        Args:
            change: ``APPEND``, ``WRITE`` or ``REMOVE``.

        Raises:
            OSError: the file cannot be saved, or too much was.
        """
        if self.has(path, appends=change == APPEND):
            return True
        saved = self._saved.get(path)
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            if saved is None:
                self._record(path, "absent", None)
            return True
        if saved is not None and saved.kind == "link" and (info.st_ino != saved.inode or change == REMOVE):
            return True
        if stat.S_ISDIR(info.st_mode):
            self._record(path, "directory", info)
        elif stat.S_ISLNK(info.st_mode):
            self._record(path, "symlink", info, os.readlink(path))
        elif not stat.S_ISREG(info.st_mode):
            return False
        elif change == APPEND and info.st_size > SMALL_BYTES:
            self._record(path, "size", info, tail_of(path, info.st_size))
        else:
            size = info.st_size if saved is None else saved.size
            is_linked = change == REMOVE and self.is_alone and info.st_nlink == 1 and self._link(path)
            if not is_linked:
                self._copy(path, size)
            self._record(path, "file", info, self._last_name, size=size, is_linked=is_linked)
        return True

    def _link(self, path: str) -> bool:
        try:
            os.link(path, self._new_name(), follow_symlinks=False)
        except OSError:  # another user's file
            return False
        return True

    def _copy(self, path: str, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise OSError("the copies take too much room")
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            target = os.open(self._new_name(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                left = size
                while left > 0:
                    done = os.sendfile(target, source, None, min(left, CHUNK_BYTES))
                    if not done:
                        raise OSError("the file has become shorter")
                    left -= done
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _new_name(self) -> str:
        self._last_name = f"{os.getpid()}-{next(self._numbers)}"
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        return f"{self._directory}/{self._last_name}"

    def _record(
        self,
        path: str,
        kind: str,
        info: os.stat_result | None,
        name: str = "",
        *,
        size: int | None = None,
        is_linked: bool = False,
    ) -> None:
        upgrades = path in self._saved
        if size is None:
            size = 0 if info is None else info.st_size
        mode, modified = (0, 0) if info is None else (stat.S_IMODE(info.st_mode), info.st_mtime_ns)
        self._write(path[len(self._root) + 1 :], kind, size, mode, modified, name, upgrades=upgrades)
        state = "link" if is_linked else "size" if kind == "size" else ""
        self._saved[path] = Saved(state, size, 0 if info is None else info.st_ino)

    def _write(
        self, path: str, kind: str, size: int, mode: int, modified: int, name: str, *, upgrades: bool = False
    ) -> None:
        line = (
            f'[{encode_basestring_ascii(path)},"{kind}",{size},{mode},{modified},'
            f"{encode_basestring_ascii(name)},{int(upgrades)}]\n"
        ).encode()
        self._index_bytes += len(line)
        if kind != "!" and (len(self._saved) >= MOST_RECORDS or self._index_bytes > MOST_INDEX_BYTES):
            raise OSError("too many files change")
        os.write(self._open_index(), line)

    def _open_index(self) -> int:
        """Return the index's descriptor, which the code may have closed or used for another file."""
        try:
            if self._index >= 0 and os.fstat(self._index).st_ino == self._index_inode:
                return self._index
        except OSError:
            pass
        self._new_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._index = os.open(f"{self._directory}/index", flags, 0o600)
        self._index_inode = os.fstat(self._index).st_ino
        return self._index


def tail_of(path: str, size: int) -> str:
    """Return the last bytes of a file of this size, in hexadecimal digits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.pread(descriptor, TAIL_BYTES, size - TAIL_BYTES).hex()
    finally:
        os.close(descriptor)
