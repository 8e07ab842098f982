"""Where the workers of this user on this host answer probes; imports little, since probes are frequent."""

from __future__ import annotations

import os
from pathlib import Path

from nekro_agent.errors import ServiceError

__all__ = ["monitor_sockets", "socket_dir", "socket_path"]


def socket_dir() -> Path:
    """The directory of the sockets; made if it is missing.

    Raises:
        ServiceError: it is not this user's alone.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a private directory below it
    directory = Path(base) / f"nekro-workers-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or directory.is_symlink():
        raise ServiceError(f"{directory} is not this user's alone; remove it, or set XDG_RUNTIME_DIR")
    return directory


def socket_path(lane: str, pid: int) -> Path:
    """Socket of one worker."""
    return socket_dir() / f"{lane}.{pid}.sock"


def monitor_sockets(lane: str | None = None) -> list[Path]:
    """Sockets of the workers of a lane, or of all; those of killed workers among them."""
    return sorted(socket_dir().glob(f"{lane or '*'}.*.sock"))
