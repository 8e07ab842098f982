"""Allocate host users for sandboxed code, where the service is root, and give them the chat's directories.

There is one user per running container key. A container key's code runs as the same user, derived from the
key, unless the code of another key runs as that user at the moment: then it gets the next free one. Files and
processes of two keys are separated by namespaces anyway, but the kernel counts processes, pipes and
descriptors in flight per user: with a shared user, one chat could use up the limits of another. A user is
held by a lock on a file named after its number, in a directory of the host, so holds work between services
and are released when a process ends. The file's content identifies the container key.

Files that an earlier run wrote as another user are given to the user of the next run. ``/app/shared`` belongs
to that user. Plugins run as root and may write there at any time: the SDK's writers give their files to the
directory's owner, a default ACL makes files of other code usable, and files that still belong to root are
given to the user when a run starts. ``/app/uploads`` stays with the service; its files are made readable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from broker_config.settings import SandboxSettings
from nekro_agent.errors import SandboxUnavailableError
from nekro_agent.files import safe_files

__all__ = [
    "UserHold",
    "hold_user",
    "lock_directory",
    "make_readable",
    "pool_range",
    "prepare_directories",
    "sandbox_uid",
]

_NAME: Final = "nekro-sandbox-users"
#: Number of host users: far more than sandboxes that one host can run.
_RANGE_SIZE: Final = 10_000


@dataclass
class UserHold:
    """A host user that no other container key gets until this is released."""

    uid: int
    _fd: int = -1

    def release(self) -> None:
        """Release the user; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def pool_range(settings: SandboxSettings) -> tuple[int, int]:
    """Return the first host user of the pool, and their number."""
    return settings.uid_range_start, _RANGE_SIZE


def sandbox_uid(container_key: str, *, settings: SandboxSettings) -> int:
    """Return the host user that a container key's code gets when that user is free."""
    number = int.from_bytes(_digest(container_key)[:8])
    return settings.uid_range_start + number % _RANGE_SIZE


def hold_user(container_key: str, *, settings: SandboxSettings, directory: Path | None = None) -> UserHold:
    """Reserve a host user for a container key's code; several holds of one key share the user.

    Unless this service is root, the code's user is its own and nothing is held.

    Args:
        directory: directory of the locks; None means that of ``lock_directory``.

    Raises:
        SandboxUnavailableError: every user of the pool is taken, or there is no directory for the locks.
    """
    if os.geteuid() != 0:
        return UserHold(os.geteuid())
    directory = directory or lock_directory((Path("/run"), Path(tempfile.gettempdir())))
    first = sandbox_uid(container_key, settings=settings) - settings.uid_range_start
    for offset in range(_RANGE_SIZE):
        uid = settings.uid_range_start + (first + offset) % _RANGE_SIZE
        fd = _lock(directory / str(uid), _digest(container_key))
        if fd is not None:
            return UserHold(uid, fd)
    raise SandboxUnavailableError(
        f"all {_RANGE_SIZE} host users from {settings.uid_range_start} on are taken by running sandboxes"
    )


def _digest(container_key: str) -> bytes:
    return hashlib.sha256(container_key.encode("utf-8", "surrogatepass")).digest()


def _lock(path: Path, owner: bytes) -> int | None:
    """Return a descriptor that shares the file with holders of the same owner; None when another has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            os.pwrite(fd, owner, 0)
        # Changing from the exclusive to the shared lock is not atomic: the content read afterwards counts.
        # This waits only for another process that is between these two lines.
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.pread(fd, len(owner), 0) == owner:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def lock_directory(parents: Iterable[Path]) -> Path:
    """Return the directory of the locks: below the first of ``parents`` where only root can write to it.

    Raises:
        SandboxUnavailableError: there is no such directory.
    """
    problems = []
    for parent in parents:
        path = parent / _NAME
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            info = path.lstat()
        except OSError as exc:
            problems.append(f"{path}: {exc.strerror}")
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == 0 and not info.st_mode & 0o022:
            return path
        problems.append(f"{path} is not a directory that only root can write to")
    raise SandboxUnavailableError(
        f"no directory for the locks of sandbox users ({'; '.join(problems)}); make one of them writable for"
        " root alone"
    )


_ACL_VERSION: Final = 2
_ACL_TAG_USER_OBJ, _ACL_TAG_USER, _ACL_TAG_GROUP_OBJ, _ACL_TAG_MASK, _ACL_TAG_OTHER = 1, 2, 4, 16, 32
_NO_ID: Final = 0xFFFFFFFF
_READ_WRITE_ENTER: Final = 7
_READ_ENTER: Final = 5


def prepare_directories(*, shared_dir: Path, uploads_dir: Path, uid: int, settings: SandboxSettings) -> None:
    """Make both directories usable for ``uid``; unless this service is root, ``uid`` is its own."""
    if os.geteuid() != 0:
        # Earlier code may have made its directory inaccessible, which would affect every later run.
        if not os.access(shared_dir, os.R_OK | os.W_OK | os.X_OK):
            with contextlib.suppress(OSError):
                os.chmod(shared_dir, 0o700)
        return
    # Twice the limit: files over the quota must change their owner too, or they could not be removed.
    most = 2 * settings.shared_files
    os.chmod(shared_dir, 0o700)
    owners = {os.geteuid(), os.stat(shared_dir).st_uid}
    safe_files.take_ownership(shared_dir, uid=uid, gid=uid, owners=owners, max_entries=most)
    # Not every file system has ACLs; without ACLs, the umask of plugins decides.
    with contextlib.suppress(OSError):
        os.setxattr(shared_dir, "system.posix_acl_default", _default_acl(uid))
    make_readable(uploads_dir)


def _default_acl(uid: int) -> bytes:
    """Encode ``u::rwx,u:<uid>:rwx,g::r-x,m::rwx,o::---``; see acl(5) and linux/posix_acl_xattr.h."""
    entries = (
        (_ACL_TAG_USER_OBJ, _READ_WRITE_ENTER, _NO_ID),
        (_ACL_TAG_USER, _READ_WRITE_ENTER, uid),
        (_ACL_TAG_GROUP_OBJ, _READ_ENTER, _NO_ID),
        (_ACL_TAG_MASK, _READ_WRITE_ENTER, _NO_ID),
        (_ACL_TAG_OTHER, 0, _NO_ID),
    )
    return struct.pack("<I", _ACL_VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def make_readable(root: Path) -> None:
    """Make directories and files below ``root`` readable for all; only the service writes there."""
    for directory, _, names in os.walk(root):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            info = path.lstat()
            wanted = _READ_ENTER if stat.S_ISDIR(info.st_mode) else 4
            if not stat.S_ISLNK(info.st_mode) and info.st_mode & wanted != wanted:
                path.chmod(stat.S_IMODE(info.st_mode) | wanted)
