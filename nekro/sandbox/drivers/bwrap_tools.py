"""Find bubblewrap and setpriv, refuse versions that do not isolate, and explain bubblewrap's errors."""

from __future__ import annotations

import errno
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["MINIMUM_VERSION", "Tools", "explain_denied_call", "explain_start_failure", "find_tools"]

#: The first version with ``--disable-userns`` and ``--size``.
MINIMUM_VERSION: Final = (0, 8)
#: Fragment of a message, and its fix; the first fragment that occurs wins.
_FIXES: Final = (
    (
        "No permissions to create new namespace",
        "user namespaces are denied: allow them (sysctl kernel.unprivileged_userns_clone=1, or the"
        " container's seccomp profile), run the service as root, or set NEKRO_SANDBOX__DRIVER=container",
    ),
    (
        "Creating new namespace failed",
        "namespaces are denied or used up: check user.max_user_namespaces, or run the service"
        " outside of a restricted container",
    ),
    (
        "setting up uid map: Permission denied",
        "AppArmor restricts user namespaces: install a profile with `userns,` for bwrap, or"
        " sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "loopback: Failed RTM_NEWADDR",
        "AppArmor restricts user namespaces: install a profile with `userns,` for bwrap",
    ),
    (
        "Can't mount proc",
        "/proc cannot be mounted inside another container: start that one with an unmasked /proc"
        " (docker: --security-opt systempaths=unconfined)",
    ),
    ("Failed to make / slave", "mounts are denied: the outer container needs CAP_SYS_ADMIN"),
    ("Operation not permitted", "this service lacks the privileges: run it as an ordinary user or full root"),
    ("Unknown option", "this bubblewrap is too old: install version 0.8 or newer"),
    ("execvp", "the interpreter or setpriv does not exist inside: check NEKRO_SANDBOX__PYTHON"),
    ("error while loading shared libraries", "the interpreter needs libraries outside of its installation"),
)

#: Errors of system calls that a container or sandbox around this service denies.
_DENIED: Final = (errno.ENOSYS, errno.EPERM, errno.EACCES)


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


def explain_denied_call(error: OSError) -> str:
    """Return the message for a failure before bubblewrap could print one itself."""
    words = f"bubblewrap could not start a sandbox: {error}"
    if error.errno not in _DENIED:
        return words
    return (
        f"{words} (a container around this service denies a call that starting a sandbox needs: loosen its"
        " seccomp profile, or set NEKRO_SANDBOX__DRIVER=container)"
    )


def explain_start_failure(output: str) -> str:
    """Return the message with the printed text and, where one is known, a fix."""
    words = " ".join(output.split())[:500] or "it printed nothing"
    for fragment, fix in _FIXES:
        if fragment in output:
            return f"bubblewrap could not start a sandbox: {words} ({fix})"
    return f"bubblewrap could not start a sandbox: {words}"
