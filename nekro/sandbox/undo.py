"""Undo what a program has changed in the shared files, before it is run again.

The guest has saved the originals in a directory of the program among these files
(``nekro.sandbox.guest.undo_log``), so they go where the files go: with a store, to other hosts. Lists of the
files omit the directory.

The code can write there what it likes. So nothing here trusts it: paths are resolved by ``safe_files``, which
follows no link, and a program that forges its originals only changes files of its own chat.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loguru import logger

from nekro_agent.errors import InvalidValueError, SandboxError
from nekro_agent.files import safe_files
from nekro_agent.files.safe_paths import DIRECTORY, open_beneath
from nekro_agent.layout import UNDO_NAME

__all__ = [
    "MOST_UNDO_BYTES",
    "NotUndoneError",
    "forget_changes",
    "has_originals",
    "note_ends",
    "undo_changes",
    "undo_name",
]

#: Most bytes of the copies of one run; links to removed files are no copies.
MOST_UNDO_BYTES: Final = 64 << 20
_MOST_RECORDS: Final = 20_000
_MOST_INDEX_BYTES: Final = (4 << 20) + (64 << 10)
#: With what ``note_ends`` has noted of each path.
_MOST_ENDS_BYTES: Final = _MOST_INDEX_BYTES + 100 * _MOST_RECORDS
#: Directories of runs that are kept: those of programs that wait, or were not run again.
_MOST_RUNS: Final = 32
#: Of the end of a file, which shows that it was only appended to.
_MOST_TAIL_DIGITS: Final = 256
_KINDS: Final = ("absent", "directory", "symlink", "size", "file")
#: Name of the file that ``note_ends`` writes.
_ENDS: Final = "ends"
_OPEN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class NotUndoneError(SandboxError):
    """An earlier attempt of a program has changed files in a way that cannot be undone."""


@dataclass(frozen=True, kw_only=True)
class _Original:
    """The state of a path before the program changed it."""

    path: str
    kind: str
    size: int
    mode: int
    modified_ns: int
    #: Name of the saved content, target of the link, or the end of a file that was appended to.
    name: str


def undo_name(program_id: str) -> str:
    """Return the name of a program's directory."""
    return hashlib.sha256(program_id.encode()).hexdigest()[:32]


def has_originals(root: Path) -> bool:
    """Whether the shared files may have originals of any program; costs nothing worth a thread."""
    return os.path.lexists(root / UNDO_NAME)


def undo_changes(root: Path, program_id: str) -> bool:
    """Put files back as they were before the program's last attempt; False if that has changed none.

    A second call does what is left after one that was interrupted.

    Raises:
        NotUndoneError: the guest gave up, or something cannot be put back.
    """
    directory = f"{UNDO_NAME}/{undo_name(program_id)}"
    _drop_oldest(root)
    try:
        index = _index_of(root, directory)
    except FileNotFoundError:
        forget_changes(root, program_id)
        return False
    except (OSError, InvalidValueError) as exc:
        raise NotUndoneError(f"the files of the earlier attempt cannot be put back: {exc}") from exc
    try:
        originals = _parse(index)
        _refuse_others(root, directory)
        _put_back(root, directory, originals)
    except (OSError, InvalidValueError, TypeError, ValueError, RecursionError) as exc:
        logger.bind(program_id=program_id, error=str(exc)).warning("sandbox_files_not_undone")
        raise NotUndoneError(f"the files of the earlier attempt cannot be put back: {exc}") from exc
    forget_changes(root, program_id)
    return True


def note_ends(root: Path, program_id: str) -> None:
    """Note how a program that waits has left the files that it changed; others may change them meanwhile.

    Raises:
        OSError: that cannot be written.
    """
    directory = f"{UNDO_NAME}/{undo_name(program_id)}"
    try:
        paths = [one.path for one in _parse(_index_of(root, directory))]
    except (OSError, InvalidValueError, TypeError, ValueError, RecursionError):
        return  # there is none, or it cannot be undone anyway
    ends = {path: _content_of(root, path) for path in paths}
    safe_files.replace_file(root, f"{directory}/{_ENDS}", json.dumps(ends).encode())


def _index_of(root: Path, directory: str) -> bytes:
    return safe_files.read_file(root, f"{directory}/index", max_bytes=_MOST_INDEX_BYTES)


def _content_of(root: Path, path: str) -> str:
    """Return the digest of a file; "" if there is no file of this name."""
    try:
        with safe_files.open_file(root, path) as file:
            return safe_files.sha256_of(file)
    except (OSError, InvalidValueError):
        return ""


def _refuse_others(root: Path, directory: str) -> None:
    """Raise ValueError if another program has changed what the one that waited had changed."""
    try:
        data = safe_files.read_file(root, f"{directory}/{_ENDS}", max_bytes=_MOST_ENDS_BYTES)
    except FileNotFoundError:
        return
    ends = json.loads(data)
    if not isinstance(ends, dict):
        raise TypeError("the note of its end is malformed")
    for path, content in ends.items():
        if _content_of(root, path) != content:
            raise ValueError(f"something else, as another program of the chat, has changed {path!a} since")
    safe_files.remove_file(root, f"{directory}/{_ENDS}")  # an interrupted undo changes them too


def forget_changes(root: Path, program_id: str) -> None:
    """Remove a program's originals; does nothing where there are none."""
    _remove_run(root, undo_name(program_id))


def _remove_run(root: Path, name: str) -> None:
    with contextlib.suppress(OSError, InvalidValueError), _opened(root) as root_fd:
        with contextlib.suppress(FileNotFoundError):
            fd = open_beneath(root_fd, (UNDO_NAME, name), DIRECTORY)
            try:
                safe_files.empty_directory(fd)
            finally:
                os.close(fd)
        safe_files.remove_empty(root_fd, f"{UNDO_NAME}/{name}")
        safe_files.remove_empty(root_fd, UNDO_NAME)


def _drop_oldest(root: Path) -> None:
    with contextlib.suppress(OSError, InvalidValueError), _opened(root) as root_fd:
        fd = open_beneath(root_fd, (UNDO_NAME,), DIRECTORY)
        try:
            names = os.listdir(fd)
            if len(names) <= _MOST_RUNS:
                return
            names.sort(key=lambda name: os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime_ns)
        finally:
            os.close(fd)
        for name in names[:-_MOST_RUNS]:
            _remove_run(root, name)


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[int]:
    """Yield a descriptor of the shared files."""
    fd = os.open(root, DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _parse(index: bytes) -> list[_Original]:
    """Return the first record of each path, or the one that completes it.

    Raises:
        ValueError: the index is malformed, or says that the guest gave up.
    """
    originals: dict[str, _Original] = {}
    # A line without its end was being written when the process was killed, before the change.
    lines = index.split(b"\n")[:-1]
    if len(lines) > _MOST_RECORDS:
        raise ValueError("too many files were changed")
    for line in lines:
        path, kind, size, mode, modified_ns, name, is_upgrade = json.loads(line)
        if kind == "!":
            raise ValueError("the program has changed files in a way that is not followed")
        numbers = (size, mode, modified_ns, is_upgrade)
        if not all(type(number) is int for number in numbers) or not 0 <= modified_ns < 1 << 63:
            raise ValueError("a number of the index is malformed")
        if kind not in _KINDS or not isinstance(path, str) or not isinstance(name, str) or size < 0:
            raise ValueError("a line of the index is malformed")
        path = "/".join(safe_files.split_path(path))
        if path.partition("/")[0] == UNDO_NAME or (kind == "file" and not name.replace("-", "").isalnum()):
            raise ValueError("a line of the index names no file")
        if path not in originals or is_upgrade:
            originals[path] = _Original(
                path=path, kind=kind, size=size, mode=mode & 0o777, modified_ns=modified_ns, name=name
            )
    return list(originals.values())


def _put_back(root: Path, directory: str, originals: list[_Original]) -> None:
    deepest_first = sorted(originals, key=lambda original: -original.path.count("/"))
    for original in deepest_first:
        if original.kind == "absent":
            _remove(root, original.path)
    for original in reversed(deepest_first):
        if original.kind == "directory":
            _make_directory(root, original)
    for original in originals:
        if original.kind == "file":
            _replace(root, f"{directory}/{original.name}", original)
        elif original.kind == "size":
            _shorten(root, original)
        elif original.kind == "symlink":
            _make_link(root, original)


def _remove(root: Path, path: str) -> None:
    """Remove what was not there; a directory with files that others have written stays."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, InvalidValueError):
        if not safe_files.remove_empty(root, path):
            with contextlib.suppress(IsADirectoryError, PermissionError):
                safe_files.remove_file(root, path)


def _make_directory(root: Path, original: _Original) -> None:
    with safe_files.parent_of(root, f"{original.path}/any") as (fd, _):
        os.fchmod(fd, original.mode)


def _make_link(root: Path, original: _Original) -> None:
    with safe_files.parent_of(root, original.path) as (fd, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        os.symlink(original.name, name, dir_fd=fd)
        info = os.fstat(fd)
        if os.geteuid() == 0:
            os.chown(name, info.st_uid, info.st_gid, dir_fd=fd, follow_symlinks=False)


def _shorten(root: Path, original: _Original) -> None:
    with _opened(root) as root_fd:
        fd = open_beneath(root_fd, safe_files.split_path(original.path), os.O_RDONLY | _OPEN)
        try:
            tail = bytes.fromhex(original.name[:_MOST_TAIL_DIGITS])
            if os.pread(fd, len(tail), original.size - len(tail)) != tail:
                raise ValueError(f"{original.path!a} was written anew")
            _settle(fd, original)
        finally:
            os.close(fd)


def _settle(fd: int, original: _Original) -> None:
    """Give a file its size, mode and time back."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_size < original.size:
        raise ValueError(f"{original.path!a} is another file now, or shorter than it was")
    if info.st_size > original.size:
        os.truncate(f"/proc/self/fd/{fd}", original.size)
    os.fchmod(fd, original.mode)
    os.utime(fd, ns=(info.st_atime_ns, original.modified_ns))


def _replace(root: Path, saved: str, original: _Original) -> None:
    """Put saved content back under its name."""
    with _opened(root) as root_fd, contextlib.ExitStack() as closing:
        try:
            fd = open_beneath(root_fd, safe_files.split_path(saved), os.O_RDONLY | _OPEN)
        except FileNotFoundError:  # it was put back before an interruption, or was removed
            info = safe_files.info_of(root_fd, original.path)
            if (info.st_size, info.st_mtime_ns) != (original.size, original.modified_ns):
                raise ValueError(f"what was saved of {original.path!a} is gone") from None
            return
        closing.callback(os.close, fd)
        parent_fd, name = closing.enter_context(safe_files.parent_of(root_fd, original.path))
        saved_fd, saved_name = closing.enter_context(safe_files.parent_of(root_fd, saved))
        if os.fstat(fd).st_nlink == 2 and _is_same(fd, parent_fd, name):
            os.unlink(saved_name, dir_fd=saved_fd)  # the change has not happened
            _settle(fd, original)
            return
        _settle(fd, original)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent_fd)
        os.rename(saved_name, name, src_dir_fd=saved_fd, dst_dir_fd=parent_fd)


def _is_same(fd: int, parent_fd: int, name: str) -> bool:
    info = os.fstat(fd)
    try:
        other = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    except OSError:
        return False
    return (info.st_dev, info.st_ino) == (other.st_dev, other.st_ino)
