"""Where workers answer probes, and which worker it is; imports little, because probes are frequent."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nekro_agent.errors import ServiceError

if TYPE_CHECKING:
    from broker_config.settings import Settings

__all__ = ["broker_id", "data_dir_id", "monitor_sockets", "socket_dir", "socket_path"]


def data_dir_id(settings: Settings) -> str:
    """Return a name for a data directory that reveals no path: answers to probes may leave the host."""
    return _digest(str(settings.data_dir.expanduser().resolve()))


def broker_id(settings: Settings) -> str | None:
    """Return a name for a broker with its key prefix, without its password; None if no URL is set."""
    from broker_config.urls import without_password

    broker = settings.broker
    return None if broker.url is None else _digest(f"{broker.key_prefix} {without_password(broker.url)}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
