"""The bubblewrap command line of a program that an operator installed, such as an MCP server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro.sandbox.drivers.bwrap_args import (
    SYSTEM_DIRECTORIES,
    as_root,
    as_user,
    device_mounts,
    directories,
    proc_mounts,
)
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "HOME_INSIDE",
    "ProgramSpec",
    "environment_inside",
    "find_executable",
    "program_arguments",
    "visible_paths",
]

HOME_INSIDE: Final = "/home/program"
#: Visible at once; a bind of a path below one of them would hide nothing.
_SYSTEM: Final = tuple(Path("/", name) for name in ("usr", *SYSTEM_DIRECTORIES))
#: Configuration that programs read, and what they need to look up names and to check certificates.
_CONFIGURATION: Final = ("alternatives", "ld.so.cache", "localtime", "mime.types", "gitconfig")
_NETWORK: Final = ("hosts", "nsswitch.conf", "resolv.conf", "services", "ssl", "pki", "ca-certificates")


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


def find_executable(spec: ProgramSpec) -> Path:
    """Return the path of the program's executable on the host.

    Raises:
        SandboxUnavailableError: there is none; the message names it.
    """
    name = spec.command[0]
    found = shutil.which(name, path=spec.environment.get("PATH"))
    if found is None:
        raise SandboxUnavailableError(
            f"there is no program {name!r} on this host; install it, or give its absolute path"
        )
    return Path(found).absolute()


def environment_inside(spec: ProgramSpec, executable: Path) -> dict[str, str]:
    """Return the whole environment of the program; it contains no other variable of the service."""
    return {
        "LANG": "C.UTF-8",
        "PATH": f"{executable.parent}:/usr/local/bin:/usr/bin:/bin",
        **spec.environment,
        "HOME": HOME_INSIDE,
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
    info_fd: int,
    seccomp_fd: int,
    passwd_fd: int,
    root_mode: bool,
    zero_device: bool,
) -> list[str]:
    """Return the arguments, without the command that runs inside; see ``bwrap_arguments``.

    Args:
        visible: as of ``visible_paths``.
        descriptors: of those paths, where bubblewrap can bind them.
    """
    mode = as_root(network=spec.network) if root_mode else as_user(network=spec.network)
    variables = environment_inside(spec, executable).items()
    return [
        "--info-fd", str(info_fd), *mode,
        "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "program",
        "--clearenv", *(word for name, value in variables for word in ("--setenv", name, value)),
        *directories(("/etc", "/home")),
        *_system(network=spec.network),
        "--perms", "0444", "--ro-bind-data", str(passwd_fd), "/etc/passwd",
        *proc_mounts(root_mode=root_mode),
        *device_mounts(spec.tmp_bytes, zero_device=zero_device),
        *_binds(visible, descriptors),
        "--bind", str(spec.home), HOME_INSIDE,
        "--chdir", HOME_INSIDE,
        "--seccomp", str(seccomp_fd),
        "--remount-ro", "/",
    ]  # fmt: skip


def _system(*, network: bool) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for path in _SYSTEM[1:]:
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in (*_CONFIGURATION, *(_NETWORK if network else ())):
        # Resolved, because a link such as that of resolv.conf may point outside of what is visible.
        source = Path("/etc", name)
        if source.exists():
            yield from ("--ro-bind", str(source.resolve()), str(source))


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
            yield from directories(_outside_system(parents))
        option = "--bind" if files[path] else "--ro-bind"
        if path in descriptors:
            yield from (f"{option}-fd", str(descriptors[path]), str(path))
        else:
            yield from (option, str(path), str(path))
        bound.append(path)


def _outside_system(paths: Iterable[Path]) -> list[str]:
    return [str(path) for path in paths if not _is_visible(path)]
