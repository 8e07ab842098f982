"""Paths of the sockets on which workers answer probes; imports little, because probes are frequent."""

from __future__ import annotations

import os
from pathlib import Path

from nekro_agent.errors import ServiceError

__all__ = ["monitor_sockets", "socket_dir", "socket_path"]


def socket_dir() -> Path:
    """Return the directory of the sockets, created if it is missing.

    Raises:
        ServiceError: other users may access it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a private directory below it
    directory = Path(base) / f"nekro-workers-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or directory.is_symlink():
        raise ServiceError(f"{directory} is not private to this user; remove it, or set XDG_RUNTIME_DIR")
    return directory


def socket_path(lane: str, pid: int) -> Path:
    """Return the socket of one worker."""
    return socket_dir() / f"{lane}.{pid}.sock"


def monitor_sockets(lane: str | None = None) -> list[Path]:
    """Return the sockets of a lane's workers, or of all workers, including those of killed workers."""
    return sorted(socket_dir().glob(f"{lane or '*'}.*.sock"))
