"""Private directories of single sandboxes, which a killed service leaves behind and the next one removes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

from nekro_agent.tools import safe_files

__all__ = ["abandoned", "make_home", "remove_home", "sweep_homes"]

#: Short, because a Unix socket below it ends at 107 bytes.
_PREFIX: Final = "nekro-box"


def make_home() -> Path:
    """Make a directory that only this user may enter; its name tells whose it is."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-"))


def remove_home(path: Path) -> None:
    """Remove such a directory with whatever the code made of its ``/tmp``."""
    with contextlib.suppress(OSError):
        safe_files.empty_directory(path)
        path.rmdir()


def sweep_homes() -> None:
    """Remove the directories of services that are gone."""
    for path in abandoned(Path(tempfile.gettempdir()), f"{_PREFIX}-"):
        remove_home(path)


def abandoned(parent: Path, prefix: str) -> list[Path]:
    """Return entries of ``parent`` called ``<prefix><pid>-…`` of ours whose process is gone."""
    found = []
    for path in parent.glob(f"{prefix}*"):
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists() and path.lstat().st_uid == os.geteuid():
            found.append(path)
    return found
