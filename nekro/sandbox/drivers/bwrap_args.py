"""The command lines of bubblewrap: what exists inside, and the user that runs it.

There are two: for code of a model, and for a program that an operator installed, such as an MCP server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.interpreter import PROGRAM_INSIDE, SITE_INSIDE, Interpreter

__all__ = [
    "LAYERS_INSIDE",
    "VISIBLE_PROC",
    "BwrapFds",
    "ProgramSpec",
    "bwrap_arguments",
    "environment_inside",
    "hidden_entries",
    "program_arguments",
    "runner_environment",
    "server_arguments",
    "visible_paths",
]

LAYERS_INSIDE: Final = "/opt/layers"
#: User id of the code inside its own user namespace, in user mode.
_USER_INSIDE: Final = "65534"
#: Home of a program.
_HOME_INSIDE: Final = "/home/program"
#: Directories of the host where programs and libraries are. They are visible, so a bind of a path below one
#: of them would hide nothing.
_SYSTEM: Final = tuple(Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"))
#: Configuration that programs read, and what they need to look up names and to check certificates.
_CONFIGURATION: Final = ("alternatives", "ld.so.cache", "localtime", "mime.types", "gitconfig")
_NETWORK: Final = ("hosts", "nsswitch.conf", "resolv.conf", "services", "ssl", "pki", "ca-certificates")
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
    #: None where this bubblewrap cannot bind descriptors.
    shared: int | None
    uploads: int | None


def runner_environment(interpreter: Interpreter, *, hash_seed: int) -> dict[str, str]:
    """Return the whole environment of sandboxed code; it contains no variable of the service.

    Args:
        hash_seed: as in ``SandboxDriver``.
    """
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
        "PYTHONHASHSEED": str(hash_seed),
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
    hash_seed: int = 0,
) -> list[str]:
    """Return the arguments, without the command that runs inside.

    Args:
        root_mode: no user namespace; the caller appends the command that changes the user.
        zero_device: whether ``/dev/zero`` exists; a shared mapping of it is memory that only a
            cgroup counts.
        hash_seed: as in ``SandboxDriver``.
    """
    return [
        *_namespaces("sandbox", root_mode=root_mode, network=False),
        *_environment(runner_environment(interpreter, hash_seed=hash_seed)),
        *_directories(("/opt", "/opt/sandbox", "/app", "/etc")),
        *_system(("ld.so.cache",)),
        *_proc_mounts(root_mode=root_mode),
        *_device_mounts(settings.tmp_bytes, zero_device=zero_device),
        *_python(interpreter, root_mode=root_mode),
        "--perms", "0444", "--ro-bind-data", str(fds.runner), PROGRAM_INSIDE,
        *_layers(spec.layers),
        *_bind(spec.shared_dir, "/app/shared", fd=fds.shared, writable=True),
        *_bind(spec.uploads_dir, "/app/uploads", fd=fds.uploads),
        "--chdir", "/app",
        "--seccomp", str(fds.seccomp),
        "--remount-ro", "/",
    ]  # fmt: skip


#: Capabilities of the fork server: at its start only where this service is root, else in its user namespace.
_SERVER_CAPABILITIES: Final = ("SETUID", "SETGID", "SETPCAP", "SYS_ADMIN", "SYS_CHROOT")


def server_arguments(
    *,
    settings: SandboxSettings,
    interpreter: Interpreter,
    layers: Sequence[Path],
    areas: Sequence[Path],
    program_fd: int,
    nothing_fd: int,
    root_mode: bool,
    zero_device: bool,
    hash_seed: int,
) -> list[str]:
    """Return the arguments for the fork server: what all its runs have in common; see ``bwrap_arguments``.

    Args:
        areas: parents of the directories of all chats, where it makes the mounts of a run's own.
        nothing_fd: of an empty file.
    """
    user = [] if root_mode else ["--unshare-user", "--uid", _USER_INSIDE, "--gid", _USER_INSIDE]
    held = [word for name in _SERVER_CAPABILITIES for word in ("--cap-add", f"CAP_{name}")]
    return [
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *user,
        "--cap-drop", "ALL", *held, "--die-with-parent", "--new-session", "--as-pid-1",
        "--hostname", "sandbox",
        *_environment(runner_environment(interpreter, hash_seed=hash_seed)),
        *_directories(("/opt", "/opt/sandbox", "/opt/sandbox/empty", "/app", "/app/shared", "/app/uploads")),
        *_directories(("/etc", "/opt/sandbox/areas")),
        *_system(("ld.so.cache",)),
        "--proc", "/proc",
        *_device_mounts(settings.tmp_bytes, zero_device=zero_device),
        *_python(interpreter, root_mode=root_mode),
        "--perms", "0444", "--ro-bind-data", str(program_fd), PROGRAM_INSIDE,
        "--perms", "0000", "--file", str(nothing_fd), "/opt/sandbox/nothing",
        *_layers(layers),
        *(word for path, name in zip(areas, ("shared", "uploads"), strict=False)
          for word in _bind(path, f"/opt/sandbox/areas/{name}", writable=name == "shared")),
        "--chdir", "/app",
        "--remount-ro", "/",
    ]  # fmt: skip


def _namespaces(hostname: str, *, root_mode: bool, network: bool) -> list[str]:
    share_net = ["--share-net"] if network else []
    unshare_net = [] if network else ["--unshare-net"]
    # Root gets no user namespace: in one, host root would stay host root outside of it. setpriv needs the
    # three capabilities to change the user, and drops them.
    as_root = [
        "--unshare-pid", *unshare_net, "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP",
    ]  # fmt: skip
    as_user = [
        "--unshare-all", *share_net, "--unshare-user", "--disable-userns",
        "--cap-drop", "ALL", "--uid", _USER_INSIDE, "--gid", _USER_INSIDE,
    ]  # fmt: skip
    mode = as_root if root_mode else as_user
    return [*mode, "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", hostname]


def _environment(variables: Mapping[str, str]) -> Iterator[str]:
    yield "--clearenv"
    for name, value in variables.items():
        yield from ("--setenv", name, value)


def _system(configuration: Iterable[str]) -> Iterator[str]:
    for path in _SYSTEM:
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from _bind(path, str(path))
    for name in configuration:
        # Resolved, because a link such as that of resolv.conf may point outside of what is visible.
        source = Path("/etc", name)
        if source.exists():
            yield from _bind(source.resolve(), str(source))


def _proc_mounts(*, root_mode: bool) -> list[str]:
    """Return the options for /proc without what describes the host."""
    arguments = ["--proc", "/proc"]
    for path in _hidden_directories():
        arguments += _empty(path, root_mode=root_mode)
    for path in _hidden_files():
        arguments += ["--ro-bind", "/dev/null", path]
    return [*arguments, "--remount-ro", "/proc"]


def hidden_entries() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and the directories of /proc that a sandbox must not see."""
    return _hidden_files(), _hidden_directories()


@cache
def _hidden_files() -> tuple[str, ...]:
    return tuple(str(path) for path in _open_entries() if not path.is_dir())


@cache
def _hidden_directories() -> tuple[str, ...]:
    below_sys = [Path("/proc", name) for name in _HIDDEN_SYSCTL]
    return tuple(str(path) for path in (*_open_entries(), *below_sys) if path.is_dir())


def _open_entries() -> list[Path]:
    """Return the entries of /proc to hide: readable by everyone, not visible by choice, not processes."""
    entries = [path for path in Path("/proc").iterdir() if not path.name.isdigit()]
    hidden = sorted(path for path in entries if path.name not in VISIBLE_PROC)
    return [path for path in hidden if path.lstat().st_mode & stat.S_IROTH]


def _device_mounts(tmp_bytes: int, *, zero_device: bool) -> list[str]:
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


def _directories(paths: Iterable[str]) -> list[str]:
    """Return the options for directories that every user may enter."""
    # Each parent is listed: directories that bubblewrap creates implicitly are closed to other users.
    return [word for path in paths for word in ("--perms", "0755", "--dir", path)]


def _python(interpreter: Interpreter, *, root_mode: bool) -> list[str]:
    arguments: list[str] = []
    # Hidden, unless the interpreter is there: its contents belong to the host.
    if Path("/usr/local").is_dir() and Path("/usr/local") not in interpreter.executable.parents:
        arguments += _empty("/usr/local", root_mode=root_mode)
    if not interpreter.in_usr:
        arguments += _bind(interpreter.prefix, str(interpreter.inside(interpreter.prefix)))
    for path in interpreter.hidden:
        arguments += _empty(str(interpreter.inside(path)), root_mode=root_mode)
    if interpreter.site:
        arguments += _directories((str(SITE_INSIDE),))
    for path, inside in zip(interpreter.site, interpreter.site_inside, strict=True):
        arguments += _bind(path, inside)
    return arguments


def _layers(layers: Iterable[Path]) -> list[str]:
    arguments = _directories((LAYERS_INSIDE,))
    for index, path in enumerate(layers):
        arguments += _bind(path, f"{LAYERS_INSIDE}/{index}")
    return arguments


def _bind(path: Path, inside: str, *, fd: int | None = None, writable: bool = False) -> list[str]:
    option = "--bind" if writable else "--ro-bind"
    return [option, str(path), inside] if fd is None else [f"{option}-fd", str(fd), inside]


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """One program, and what it sees of the host."""

    #: Names the owner of its files: programs of different keys run as different host users where possible.
    key: str
    command: tuple[str, ...]
    #: Its whole environment, besides HOME, LANG, PATH and TMPDIR.
    environment: Mapping[str, str]
    #: Its own writable directory; exists.
    home: Path
    #: Paths of the host that it sees at the same place, and whether it may write there.
    files: Mapping[Path, bool]
    #: Files and directories of the host that it must not see, each with what it is.
    secrets: Mapping[Path, str]
    network: bool
    memory_bytes: int
    max_processes: int
    tmp_bytes: int = 256 << 20


def environment_inside(spec: ProgramSpec, executable: Path) -> dict[str, str]:
    """Return the whole environment of the program; it contains no other variable of the service."""
    return {
        "LANG": "C.UTF-8",
        "PATH": f"{executable.parent}:/usr/local/bin:/usr/bin:/bin",
        **spec.environment,
        "HOME": _HOME_INSIDE,
        "TMPDIR": "/tmp",  # noqa: S108 - a path inside
    }


def visible_paths(spec: ProgramSpec, executable: Path) -> dict[Path, bool]:
    """Return what the program sees of the host besides the system, and whether it may write there."""
    return {path: False for path in _installation(executable)} | dict(spec.files)


def program_arguments(
    spec: ProgramSpec,
    executable: Path,
    *,
    visible: Mapping[Path, bool],
    descriptors: Mapping[Path, int],
    seccomp_fd: int,
    passwd_fd: int,
    root_mode: bool,
    zero_device: bool,
    hash_seed: int = 0,
) -> list[str]:
    """Return the arguments, without the command that runs inside; see ``bwrap_arguments``.

    Args:
        visible: the result of ``visible_paths``.
        descriptors: of those paths, where bubblewrap can bind them.
    """
    return [
        *_namespaces("program", root_mode=root_mode, network=spec.network),
        *_environment(environment_inside(spec, executable)),
        *_directories(("/etc", "/home")),
        *_system((*_CONFIGURATION, *(_NETWORK if spec.network else ()))),
        "--perms", "0444", "--ro-bind-data", str(passwd_fd), "/etc/passwd",
        *_proc_mounts(root_mode=root_mode),
        *_device_mounts(spec.tmp_bytes, zero_device=zero_device),
        *_binds(visible, descriptors),
        *_bind(spec.home, _HOME_INSIDE, writable=True),
        "--chdir", _HOME_INSIDE,
        "--seccomp", str(seccomp_fd),
        "--remount-ro", "/",
    ]  # fmt: skip


def _installation(executable: Path) -> Iterator[Path]:
    """Yield what belongs to an executable outside of the system's directories."""
    for path in dict.fromkeys((executable, executable.resolve())):
        if _is_visible(path):
            continue
        environment = path.parent.parent
        configuration = environment / "pyvenv.cfg"
        if not configuration.is_file():
            yield path
            continue
        yield environment
        for line in configuration.read_bytes().split(b"\n"):
            key, _, value = line.partition(b"=")
            base = Path(os.fsdecode(value.strip())).resolve().parent
            if key.strip() == b"home" and value.strip() and not _is_visible(base):
                yield base


def _is_visible(path: Path) -> bool:
    return any(path == top or top in path.parents for top in _SYSTEM)


def _binds(files: Mapping[Path, bool], descriptors: Mapping[Path, int]) -> Iterator[str]:
    """Yield the binds, outer paths first, so that a path inside another one keeps its own access."""
    made: set[Path] = {Path("/"), Path("/etc"), Path("/home")}
    bound: list[Path] = []
    for path in sorted(files, key=lambda path: len(path.parts)):
        if not any(outer in path.parents for outer in bound):
            parents = [parent for parent in reversed(path.parents) if parent not in made]
            made.update(parents)
            yield from _directories(str(parent) for parent in parents if not _is_visible(parent))
        yield from _bind(path, str(path), fd=descriptors.get(path), writable=files[path])
        bound.append(path)
