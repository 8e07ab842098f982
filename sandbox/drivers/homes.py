"""Private directories of single sandboxes, which a killed service leaves behind and the next one removes."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from nekro_agent.tools import safe_files
from sandbox.service_id import pid_namespace

__all__ = ["abandoned", "make_home", "remove_home", "sweep_homes"]

#: Short, because a Unix socket below it ends at 107 bytes.
_PREFIX: Final = "nekro-box"
_NAMESPACE_MARK: Final = re.compile(r"ns\d+-")


def _namespace_mark() -> str:
    return f"ns{pid_namespace()}"


def make_home() -> Path:
    """Make a directory that only this user may enter; its name tells whose it is."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-{_namespace_mark()}-"))


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
    """Return entries of ``parent`` called ``<prefix><pid>-…`` of ours whose process is gone.

    One that names another process namespace (``<prefix><pid>-ns<number>-…``) is not ours to judge.
    """
    found = []
    for path in parent.glob(f"{prefix}*"):
        pid, _, rest = path.name.removeprefix(prefix).partition("-")
        if _NAMESPACE_MARK.match(rest) and not rest.startswith(f"{_namespace_mark()}-"):
            continue
        if pid.isdigit() and not Path("/proc", pid).exists() and path.lstat().st_uid == os.geteuid():
            found.append(path)
    return found
