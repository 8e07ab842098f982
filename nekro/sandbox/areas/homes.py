"""Private directories of single sandboxes; services remove those that a killed service has left."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

from nekro.sandbox.service_id import ServiceId, own_id
from nekro_agent.files import safe_files

__all__ = ["make_home", "remove_home", "sweep_homes"]

#: Short, because the path of a Unix socket below it has at most 107 bytes.
_PREFIX: Final = "nekro-box"


def make_home() -> Path:
    """Create a directory that only this user may enter; its name identifies this service."""
    owner = own_id()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{owner.pid}-{owner.started}-ns{owner.namespace}-"))


def remove_home(path: Path) -> None:
    """Remove such a directory with everything that the code created in it."""
    with contextlib.suppress(OSError):
        safe_files.empty_directory(path)
        path.rmdir()


def sweep_homes() -> None:
    """Remove the directories of services that have ended.

    Directories of another process namespace are kept: whether their service runs is not visible here.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        owner = _owner_of(path)
        if owner is not None and owner.is_gone(still_runs=True):
            with contextlib.suppress(FileNotFoundError):  # another service sweeps too
                if path.lstat().st_uid == os.geteuid():
                    remove_home(path)


def _owner_of(path: Path) -> ServiceId | None:
    words = path.name.split("-")[2:]
    if len(words) != 4 or not words[2].startswith("ns"):
        return None
    pid, started, namespace = words[0], words[1], words[2].removeprefix("ns")
    own = own_id()
    return ServiceId.parse(f"{own.host}/{own.boot}/{namespace}/{pid}/{started}")
