"""The bubblewrap command line of a sandbox: what exists inside and under which user."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.interpreter import PROGRAM_INSIDE, SITE_INSIDE, Interpreter

__all__ = [
    "LAYERS_INSIDE",
    "SYSTEM_DIRECTORIES",
    "VISIBLE_PROC",
    "BwrapFds",
    "as_root",
    "as_user",
    "bwrap_arguments",
    "device_mounts",
    "directories",
    "proc_mounts",
    "runner_environment",
]

LAYERS_INSIDE: Final = "/opt/layers"
#: User id of the code inside its own user namespace, in user mode.
_USER_INSIDE: Final = "65534"
#: Directories of the host besides /usr where programs and libraries are.
SYSTEM_DIRECTORIES: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES: Final = ("null", "full", "urandom")
#: Visible entries of /proc besides the directories of processes; entries of later kernels are hidden.
#: First those that libraries read, then constant facts of the hardware, entries of the sandbox's own
#: namespaces, and entries that repeat ``stat`` and ``meminfo``. Each hidden entry costs a mount, 0.1 ms of
#: a start.
VISIBLE_PROC: Final = frozenset((
    "cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "net", "self", "stat", "sys", "thread-self",
    "uptime", "version",
    "acpi", "bus", "cgroups", "consoles", "crypto", "devices", "dma", "driver", "execdomains", "iomem",
    "ioports", "irq", "misc", "mtrr", "partitions", "swaps", "sysvipc", "tty",
))  # fmt: skip
#: Directories of /proc/sys with counters of the whole host, and the id of its last start.
_HIDDEN_SYSCTL: Final = ("sys/fs", "sys/kernel/random")
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
    """Return the whole environment of sandboxed code; it contains no variable of the service."""
    environment = {
        "HOME": "/tmp",  # noqa: S108 - a path inside
        "LANG": "C.UTF-8",
        "LOGNAME": "sandbox",
        # Each arena of the C library reserves address space that the limit would count.
        "MALLOC_ARENA_MAX": "2",
        "MPLCONFIGDIR": "/tmp/matplotlib",  # noqa: S108 - a path inside
        # One thread per library call: more would use up address space and the process limit.
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
        zero_device: whether ``/dev/zero`` exists; a shared mapping of it is memory that only a
            cgroup counts.
    """
    return [
        "--info-fd", str(fds.info),
        *(as_root() if root_mode else as_user()),
        "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox",
        "--clearenv", *_environment(interpreter),
        *directories(("/opt", "/opt/sandbox", "/app", "/etc")),
        *_system(interpreter, root_mode=root_mode),
        *proc_mounts(root_mode=root_mode),
        *device_mounts(settings.tmp_bytes, zero_device=zero_device),
        *_python(interpreter, root_mode=root_mode),
        "--perms", "0444", "--ro-bind-data", str(fds.runner), PROGRAM_INSIDE,
        *_layers(spec.layers),
        *_bind(fds.shared, spec.shared_dir, "/app/shared", read_only=False),
        *_bind(fds.uploads, spec.uploads_dir, "/app/uploads", read_only=True),
        "--chdir", "/app",
        "--seccomp", str(fds.seccomp),
        "--remount-ro", "/",
    ]  # fmt: skip


def as_user(*, network: bool = False) -> list[str]:
    """Return the options of user mode.

    Args:
        network: whether the host's network is shared.
    """
    return [
        "--unshare-all", *(["--share-net"] if network else []), "--unshare-user", "--disable-userns",
        "--cap-drop", "ALL", "--uid", _USER_INSIDE, "--gid", _USER_INSIDE,
    ]  # fmt: skip


def as_root(*, network: bool = False) -> list[str]:
    """Return the options of root mode; see ``as_user``."""
    # Without a user namespace: in one, host root would stay host root outside of it. setpriv needs the
    # three capabilities to change the user, and drops them.
    return [
        "--unshare-pid", *([] if network else ["--unshare-net"]), "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try",
        "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP",
    ]  # fmt: skip


def _environment(interpreter: Interpreter) -> list[str]:
    pairs = runner_environment(interpreter).items()
    return [word for name, value in pairs for word in ("--setenv", name, value)]


def _system(interpreter: Interpreter, *, root_mode: bool) -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_DIRECTORIES:
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # Hidden, unless the interpreter is there: its contents belong to the host.
    if Path("/usr/local").is_dir() and Path("/usr/local") not in interpreter.executable.parents:
        arguments += _empty("/usr/local", root_mode=root_mode)
    return arguments


def proc_mounts(*, root_mode: bool) -> list[str]:
    """Return the options for /proc without what describes the host."""
    arguments = ["--proc", "/proc"]
    for path in _hiddendirectories():
        arguments += _empty(path, root_mode=root_mode)
    for path in _hidden_files():
        arguments += ["--ro-bind", "/dev/null", path]
    return [*arguments, "--remount-ro", "/proc"]


@cache
def _hidden_files() -> tuple[str, ...]:
    return tuple(str(path) for path in _open_entries() if not path.is_dir())


@cache
def _hiddendirectories() -> tuple[str, ...]:
    below_sys = [Path("/proc", name) for name in _HIDDEN_SYSCTL]
    return tuple(str(path) for path in (*_open_entries(), *below_sys) if path.is_dir())


def _open_entries() -> list[Path]:
    """Return the entries of /proc to hide: readable by everyone, not visible by choice, not processes."""
    entries = [path for path in Path("/proc").iterdir() if not path.name.isdigit()]
    hidden = sorted(path for path in entries if path.name not in VISIBLE_PROC)
    return [path for path in hidden if path.lstat().st_mode & stat.S_IROTH]


def device_mounts(tmp_bytes: int, *, zero_device: bool) -> list[str]:
    """Return the options for /dev and /tmp; the latter and /dev/shm have ``tmp_bytes`` each."""
    arguments = ["--perms", "0755", "--size", _EMPTY_BYTES, "--tmpfs", "/dev"]
    for name in (*_DEVICES, *(("zero",) if zero_device else ())):
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    # Since Linux 5.6 the same device, except that random blocks shortly after boot.
    links = {"random": "urandom", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        arguments += ["--symlink", target, f"/dev/{name}"]
    arguments += _writable_tmpfs("/dev/shm", tmp_bytes)  # noqa: S108 - a path inside
    return [*arguments, "--remount-ro", "/dev", *_writable_tmpfs("/tmp", tmp_bytes)]  # noqa: S108


def _writable_tmpfs(path: str, size_bytes: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size_bytes), "--tmpfs", path]


def _empty(path: str, *, root_mode: bool) -> list[str]:
    # In root mode root owns the directory, so the code's user cannot write to it without a remount.
    read_only = [] if root_mode else ["--remount-ro", path]
    return ["--perms", "0555", "--size", _EMPTY_BYTES, "--tmpfs", path, *read_only]


def directories(paths: Iterable[str]) -> list[str]:
    """Return the options for directories that every user may enter."""
    # Each parent is listed: directories that bubblewrap creates implicitly are closed to other users.
    return [word for path in paths for word in ("--perms", "0755", "--dir", path)]


def _python(interpreter: Interpreter, *, root_mode: bool) -> list[str]:
    arguments: list[str] = []
    if not interpreter.in_usr:
        arguments += ["--ro-bind", str(interpreter.prefix), str(interpreter.inside(interpreter.prefix))]
    for path in interpreter.hidden:
        arguments += _empty(str(interpreter.inside(path)), root_mode=root_mode)
    if interpreter.site:
        arguments += directories((str(SITE_INSIDE),))
    for path, inside in zip(interpreter.site, interpreter.site_inside, strict=True):
        arguments += ["--ro-bind", str(path), inside]
    return arguments


def _layers(layers: Iterable[Path]) -> list[str]:
    arguments = directories((LAYERS_INSIDE,))
    for index, path in enumerate(layers):
        arguments += ["--ro-bind", str(path), f"{LAYERS_INSIDE}/{index}"]
    return arguments


def _bind(fd: int | None, path: Path, inside: str, *, read_only: bool) -> list[str]:
    option = "--ro-bind" if read_only else "--bind"
    if fd is None:
        return [option, str(path), inside]
    return [f"{option}-fd", str(fd), inside]
