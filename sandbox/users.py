"""Host users of sandboxed code, where the service is root: one per container among all that run.

A container's code always runs as the same user, derived from its key, unless another container's
code runs as that one just now: then it is the next free one. Two users at once matter little to
files and processes, which lie in other namespaces, but the kernel counts processes, pipes and
descriptors in flight by user: by sharing one, a chat could use up another's.

A user is held by a lock on a file that bears its number, in a directory of the host, so it holds
between services and goes with a process that dies. What the file says is whose code holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from broker_config.settings import SandboxSettings
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["UserHold", "hold_user", "lock_directory", "sandbox_uid"]

_NAME: Final = "nekro-sandbox-users"


@dataclass
class UserHold:
    """A host user that no other container's code has until this is released."""

    uid: int
    _fd: int = -1

    def release(self) -> None:
        """Let go; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def sandbox_uid(container_key: str, *, settings: SandboxSettings) -> int:
    """Return the host user that a container's code has when nobody else's has it."""
    number = int.from_bytes(_digest(container_key)[:8])
    return settings.uid_range_start + number % settings.uid_range_size


def hold_user(container_key: str, *, settings: SandboxSettings, directory: Path | None = None) -> UserHold:
    """Take a host user for a container's code; several holds of one container share theirs.

    Unless this service is root, the code's user is its own and nothing is held.

    Args:
        directory: where the locks lie; None means the host's own place for that.

    Raises:
        SandboxUnavailableError: every user of the pool is taken, or there is no place for the locks.
    """
    if os.geteuid() != 0:
        return UserHold(os.geteuid())
    directory = directory or lock_directory((Path("/run"), Path(tempfile.gettempdir())))
    first = sandbox_uid(container_key, settings=settings) - settings.uid_range_start
    for offset in range(settings.uid_range_size):
        uid = settings.uid_range_start + (first + offset) % settings.uid_range_size
        fd = _lock(directory / str(uid), _digest(container_key))
        if fd is not None:
            return UserHold(uid, fd)
    raise SandboxUnavailableError(
        f"all {settings.uid_range_size} host users from {settings.uid_range_start} on are taken by running"
        " sandboxes; raise NEKRO_SANDBOX__UID_RANGE_SIZE"
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
        # From the exclusive lock to the shared one is no single step: what the file says then counts.
        # To wait here is to wait for somebody who is between these two lines.
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.pread(fd, len(owner), 0) == owner:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def lock_directory(parents: Iterable[Path]) -> Path:
    """Return the directory of the locks: in the first of ``parents`` where only root can write it.

    Raises:
        SandboxUnavailableError: there is none.
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
        problems.append(f"{path} belongs to somebody else")
    raise SandboxUnavailableError(
        f"no place for the locks of sandbox users ({'; '.join(problems)}); make one of them writable for root"
    )
