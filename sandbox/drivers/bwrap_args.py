"""The bubblewrap command line of a sandbox: what exists inside and under which user."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from sandbox.bundle import PROGRAM_INSIDE
from sandbox.drivers.base import SandboxSpec
from sandbox.interpreter import SITE_INSIDE, Interpreter

__all__ = ["LAYERS_INSIDE", "BwrapFds", "bwrap_arguments", "runner_environment"]

LAYERS_INSIDE: Final = "/opt/layers"
#: Who the code is inside its own user namespace, in user mode.
_USER_INSIDE: Final = "65534"
_SYSTEM_DIRS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES: Final = ("null", "full", "random", "urandom")
#: Files of /proc that tell about the host and about nothing inside.
_HIDDEN_PROC: Final = ("cmdline", "kallsyms", "keys", "timer_list", "sched_debug", "latency_stats")
_EMPTY_BYTES: Final = "4096"


@dataclass(frozen=True, kw_only=True)
class BwrapFds:
    """Descriptors that bubblewrap inherits and consumes."""

    seccomp: int
    runner: int
    info: int
    #: None where this bubblewrap cannot bind descriptors.
    shared: int | None
    uploads: int | None


def runner_environment(interpreter: Interpreter) -> dict[str, str]:
    """Return the whole environment of sandboxed code; nothing of the service's own is in it."""
    environment = {
        "HOME": "/tmp",  # noqa: S108 - a path inside
        "LANG": "C.UTF-8",
        "LOGNAME": "sandbox",
        # Each arena of the C library reserves address space that the limit would count.
        "MALLOC_ARENA_MAX": "2",
        "MPLCONFIGDIR": "/tmp/matplotlib",  # noqa: S108 - a path inside
        # One thread per library call: more would eat address space and the process limit.
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": f"{interpreter.executable_inside.parent}:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": "/tmp",  # noqa: S108 - a path inside
    }
    if interpreter.library_path_inside is not None:
        environment["LD_LIBRARY_PATH"] = str(interpreter.library_path_inside)
    return environment


def bwrap_arguments(
    spec: SandboxSpec,
    *,
    settings: SandboxSettings,
    interpreter: Interpreter,
    fds: BwrapFds,
    root_mode: bool,
    zero_device: bool,
) -> list[str]:
    """Return the arguments, without the command that runs inside.

    Args:
        root_mode: no user namespace; the caller appends the command that changes the user.
        zero_device: whether ``/dev/zero`` exists: mapped shared, it is memory that only a
            cgroup can count.
    """
    return [
        "--info-fd", str(fds.info),
        *(_root_mode() if root_mode else _user_mode()),
        "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox",
        "--clearenv", *_environment(interpreter),
        *_directories(("/opt", "/opt/sandbox", "/app", "/etc")),
        *_system(interpreter),
        *_proc_and_devices(settings, zero_device=zero_device),
        *_python(interpreter),
        "--perms", "0444", "--ro-bind-data", str(fds.runner), PROGRAM_INSIDE,
        *_layers(spec.layers),
        *_bind(fds.shared, spec.shared_dir, "/app/shared", read_only=False),
        *_bind(fds.uploads, spec.uploads_dir, "/app/uploads", read_only=True),
        "--chdir", "/app",
        "--seccomp", str(fds.seccomp),
        "--remount-ro", "/",
    ]  # fmt: skip


def _user_mode() -> list[str]:
    return [
        "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL",
        "--uid", _USER_INSIDE, "--gid", _USER_INSIDE,
    ]  # fmt: skip


def _root_mode() -> list[str]:
    # Without a user namespace: in one, host root would stay host root outside of it. The three
    # capabilities are what setpriv needs to become somebody else; it drops them on the way.
    return [
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP",
    ]  # fmt: skip


def _environment(interpreter: Interpreter) -> list[str]:
    pairs = runner_environment(interpreter).items()
    return [word for name, value in pairs for word in ("--setenv", name, value)]


def _system(interpreter: Interpreter) -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_DIRS:
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Whatever the host keeps there besides the interpreter is not the code's business.
    if Path("/usr/local").is_dir() and Path("/usr/local") not in interpreter.executable.parents:
        arguments += _empty("/usr/local")
    return arguments


def _proc_and_devices(settings: SandboxSettings, *, zero_device: bool) -> list[str]:
    arguments = ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    for name in _HIDDEN_PROC:
        if Path("/proc", name).exists():
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    arguments += ["--remount-ro", "/proc", "--perms", "0755", "--size", _EMPTY_BYTES, "--tmpfs", "/dev"]
    for name in (*_DEVICES, *(("zero",) if zero_device else ())):
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        arguments += ["--symlink", target, f"/dev/{name}"]
    arguments += _writable_tmpfs("/dev/shm", settings.shm_bytes)  # noqa: S108 - a path inside
    return [*arguments, "--remount-ro", "/dev", *_writable_tmpfs("/tmp", settings.tmp_bytes)]  # noqa: S108


def _writable_tmpfs(path: str, size_bytes: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size_bytes), "--tmpfs", path]


def _empty(path: str) -> list[str]:
    return ["--perms", "0555", "--size", _EMPTY_BYTES, "--tmpfs", path, "--remount-ro", path]


def _directories(paths: Iterable[str]) -> list[str]:
    # Named one by one: parents that bubblewrap makes by itself are closed to other users.
    return [word for path in paths for word in ("--perms", "0755", "--dir", path)]


def _python(interpreter: Interpreter) -> list[str]:
    arguments: list[str] = []
    if not interpreter.in_usr:
        arguments += ["--ro-bind", str(interpreter.prefix), str(interpreter.inside(interpreter.prefix))]
    for path in interpreter.hidden:
        arguments += _empty(str(interpreter.inside(path)))
    if interpreter.site:
        arguments += _directories((str(SITE_INSIDE),))
    for path, inside in zip(interpreter.site, interpreter.site_inside, strict=True):
        arguments += ["--ro-bind", str(path), inside]
    return arguments


def _layers(layers: Iterable[Path]) -> list[str]:
    arguments = _directories((LAYERS_INSIDE,))
    for index, path in enumerate(layers):
        arguments += ["--ro-bind", str(path), f"{LAYERS_INSIDE}/{index}"]
    return arguments


def _bind(fd: int | None, path: Path, inside: str, *, read_only: bool) -> list[str]:
    option = "--ro-bind" if read_only else "--bind"
    if fd is None:
        return [option, str(path), inside]
    return [f"{option}-fd", str(fd), inside]
