"""Explain bubblewrap's error messages and suggest fixes to the operator."""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["explain_denied_call", "explain_start_failure"]

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
