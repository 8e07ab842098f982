"""Find bubblewrap and setpriv, and refuse versions that do not isolate."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["MINIMUM_VERSION", "Tools", "find_tools"]

#: The first version with ``--disable-userns`` and ``--size``.
MINIMUM_VERSION: Final = (0, 8)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The programs that the bubblewrap driver starts."""

    bwrap: str
    #: Empty in user mode.
    setpriv: str
    version: str
    #: Whether a directory can be bound by its descriptor, so that a swapped path changes nothing.
    binds_descriptors: bool


def find_tools(search_path: str | None, *, root_mode: bool) -> Tools:
    """Find and check the programs.

    Raises:
        SandboxUnavailableError: one is missing, too old or setuid; the message says what to install.
    """
    bwrap = shutil.which("bwrap", path=search_path)
    if bwrap is None:
        raise SandboxUnavailableError(
            "bubblewrap is not installed; install it (Debian: apt install bubblewrap)"
        )
    if Path(bwrap).stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
        # CVE-2026-41163: a setuid bubblewrap gives root to its callers.
        raise SandboxUnavailableError(f"{bwrap} is setuid; remove the bit (chmod u-s,g-s {bwrap})")
    version = _version(bwrap)
    setpriv = shutil.which("setpriv", path=search_path) if root_mode else ""
    if setpriv is None:
        raise SandboxUnavailableError(
            "setpriv is not installed; it drops root inside: install util-linux, or run as another user"
        )
    options = _ask(bwrap, "--help")
    return Tools(bwrap=bwrap, setpriv=setpriv, version=version, binds_descriptors="--bind-fd" in options)


def _version(bwrap: str) -> str:
    text = _ask(bwrap, "--version")
    numbers = re.search(r"(\d+)\.(\d+)(?:\.\d+)?", text)
    if numbers is None:
        raise SandboxUnavailableError(f"{bwrap} does not print its version; install bubblewrap 0.8 or newer")
    if (int(numbers[1]), int(numbers[2])) < MINIMUM_VERSION:
        raise SandboxUnavailableError(f"{bwrap} is version {numbers[0]}; install bubblewrap 0.8 or newer")
    return numbers[0]


def _ask(program: str, option: str) -> str:
    try:
        answer = subprocess.run(  # noqa: S603 - found on PATH by us
            [program, option], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise SandboxUnavailableError(f"{program} cannot be run: {exc}; reinstall bubblewrap") from exc
    return answer.stdout + answer.stderr
