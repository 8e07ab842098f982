"""Control groups: the only bound on the memory of all processes of a run together.

Version 2 where a writable subtree with the controllers was delegated to this service, else
version 1 as root. Where there is neither, the caller falls back to resource limits, a
stricter seccomp filter and the watchdog, and ``nekro doctor`` says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from sandbox import proc_files
from sandbox.drivers.base import Check, Usage
from sandbox.models import Limit

__all__ = ["Cgroups", "Group", "find_cgroups"]

#: Version 2 forbids processes beside child groups: the service itself moves into this leaf.
_SERVICE_LEAF: Final = "nekro-service"
_PREFIX: Final = "nekro-run"
_CPU_PERIOD_MICROSECONDS: Final = 100_000
#: One count per process: several drivers make groups beside each other.
_numbers: Final = itertools.count()
_NEEDED_V2: Final = ("memory", "pids")
_MEND: Final = (
    "delegate a cgroup to this service (systemd: Delegate=yes) or run it as root;"
    " until then a watchdog bounds memory, up to its polling interval"
)


class Group(ABC):
    """The control group of one sandbox."""

    @abstractmethod
    def attach(self, pid: int) -> None:
        """Put a process, and whatever it starts from now on, under the limits."""

    @abstractmethod
    def limit_hit(self) -> Limit | None:
        """Say which limit the kernel enforced by killing or refusing; None when none."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what the group uses now."""

    @abstractmethod
    def processes(self) -> list[int]:
        """Return the host ids of the group's processes."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the group; its processes must be gone."""


class Cgroups(ABC):
    """Makes groups on one version of the kernel's interface."""

    #: ``cgroup v1`` or ``cgroup v2``.
    name: str

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings

    def _next_name(self) -> str:
        return f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"

    @abstractmethod
    def create(self) -> Group:
        """Make a group with the limits of the settings.

        Raises:
            OSError: the kernel refused.
        """


@dataclass(frozen=True)
class _GroupV1(Group):
    paths: Mapping[str, Path]

    def attach(self, pid: int) -> None:
        for path in self.paths.values():
            _write(path / "cgroup.procs", pid)

    def limit_hit(self) -> Limit | None:
        if _counter(self.paths["memory"] / "memory.oom_control", "oom_kill"):
            return Limit.MEMORY
        if "pids" in self.paths and _counter(self.paths["pids"] / "pids.events", "max"):
            return Limit.PIDS
        return None

    def usage(self) -> Usage:
        cpu = self.paths.get("cpuacct")
        pids = self.paths.get("pids")
        return Usage(
            memory_bytes=_number(self.paths["memory"] / "memory.usage_in_bytes"),
            processes=_number(pids / "pids.current") if pids else None,
            cpu_seconds=_number(cpu / "cpuacct.usage") / 1e9 if cpu else None,
        )

    def processes(self) -> list[int]:
        return _pids(self.paths["memory"] / "cgroup.procs")

    def remove(self) -> None:
        for path in self.paths.values():
            _remove(path)


class _CgroupsV1(Cgroups):
    name = "cgroup v1"

    def __init__(self, settings: SandboxSettings, parents: Mapping[str, Path]) -> None:
        super().__init__(settings)
        self._parents = parents
        for parent in parents.values():
            _remove_abandoned(parent)

    def create(self) -> Group:
        name = self._next_name()
        paths = {controller: parent / name for controller, parent in self._parents.items()}
        for path in paths.values():
            path.mkdir()
        _write(paths["memory"] / "memory.limit_in_bytes", self._settings.memory_bytes)
        with contextlib.suppress(OSError):  # absent where the kernel does not account swap
            _write(paths["memory"] / "memory.memsw.limit_in_bytes", self._settings.memory_bytes)
        if "pids" in paths:
            _write(paths["pids"] / "pids.max", self._settings.max_processes)
        if "cpu" in paths:
            _write(paths["cpu"] / "cpu.cfs_period_us", _CPU_PERIOD_MICROSECONDS)
            _write(paths["cpu"] / "cpu.cfs_quota_us", _CPU_PERIOD_MICROSECONDS)
        return _GroupV1(paths)


@dataclass(frozen=True)
class _GroupV2(Group):
    path: Path

    def attach(self, pid: int) -> None:
        _write(self.path / "cgroup.procs", pid)

    def limit_hit(self) -> Limit | None:
        if _counter(self.path / "memory.events", "oom_kill"):
            return Limit.MEMORY
        if _counter(self.path / "pids.events", "max"):
            return Limit.PIDS
        return None

    def usage(self) -> Usage:
        return Usage(
            memory_bytes=_number(self.path / "memory.current"),
            processes=_number(self.path / "pids.current"),
            cpu_seconds=_counter(self.path / "cpu.stat", "usage_usec") / 1e6,
        )

    def processes(self) -> list[int]:
        return _pids(self.path / "cgroup.procs")

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # since Linux 5.14; the namespace's end kills as well
            _write(self.path / "cgroup.kill", 1)
        _remove(self.path)


class _CgroupsV2(Cgroups):
    name = "cgroup v2"

    def __init__(self, settings: SandboxSettings, parent: Path) -> None:
        super().__init__(settings)
        self._parent = parent
        _remove_abandoned(parent)

    def create(self) -> Group:
        path = self._parent / self._next_name()
        path.mkdir()
        _write(path / "memory.max", self._settings.memory_bytes)
        with contextlib.suppress(OSError):  # absent where the kernel does not account swap
            _write(path / "memory.swap.max", 0)
        _write(path / "pids.max", self._settings.max_processes)
        with contextlib.suppress(OSError):  # the cpu controller is worth having, not needed
            _write(path / "cpu.max", f"{_CPU_PERIOD_MICROSECONDS} {_CPU_PERIOD_MICROSECONDS}")
        return _GroupV2(path)


def find_cgroups(
    settings: SandboxSettings, *, proc: Path = Path("/proc/self")
) -> tuple[Cgroups | None, Check]:
    """Find control groups that this service may write.

    Args:
        proc: where to read ``cgroup`` and ``mountinfo``; tests point it elsewhere.

    Returns:
        The groups, None when there are none, and the line for ``nekro doctor``.
    """
    mounts = _cgroup_mounts(proc_files.read(proc / "mountinfo"))
    memberships = proc_files.memberships(proc_files.read(proc / "cgroup"))
    found: Cgroups | None = None
    reasons = []
    for attempt in (_try_v2, _try_v1):
        try:
            found = attempt(settings, mounts, memberships)
            break
        except (OSError, LookupError) as exc:
            reasons.append(str(exc))
    if found is None:
        return None, Check(
            name="control groups", ok=False, detail="; ".join(reasons), mend=_MEND, needed=False
        )
    # Making one group proves more than looking at permissions.
    found.create().remove()
    return found, Check(name="control groups", ok=True, detail=f"{found.name} bounds memory and processes")


def _try_v2(
    settings: SandboxSettings, mounts: Mapping[str, tuple[Path, str]], memberships: Mapping[str, str]
) -> Cgroups:
    if "" not in mounts or "" not in memberships:
        raise LookupError("cgroup v2 is not mounted")
    own = _directory(mounts[""], memberships[""])
    parent = own.parent if own.name == _SERVICE_LEAF else own
    missing = set(_NEEDED_V2) - set(_words(parent / "cgroup.controllers"))
    if missing:
        raise LookupError(f"cgroup v2 has no {' and no '.join(sorted(missing))} controller here")
    enabled = set(_words(parent / "cgroup.subtree_control"))
    if not set(_NEEDED_V2) <= enabled:
        _enable_controllers(parent)
    return _CgroupsV2(settings, parent)


def _enable_controllers(parent: Path) -> None:
    leaf = parent / _SERVICE_LEAF
    leaf.mkdir(exist_ok=True)
    for pid in _words(parent / "cgroup.procs"):
        with contextlib.suppress(ProcessLookupError):
            _write(leaf / "cgroup.procs", pid)
    available = _words(parent / "cgroup.controllers")
    wanted = [name for name in (*_NEEDED_V2, "cpu") if name in available]
    _write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))


def _try_v1(
    settings: SandboxSettings, mounts: Mapping[str, tuple[Path, str]], memberships: Mapping[str, str]
) -> Cgroups:
    if "memory" not in mounts or "memory" not in memberships:
        raise LookupError("cgroup v1 has no memory controller here")
    parents = {
        name: _directory(mounts[name], memberships[name])
        for name in ("memory", "pids", "cpu", "cpuacct")
        if name in mounts and name in memberships
    }
    for name, path in parents.items():
        if not os.access(path, os.W_OK):
            raise LookupError(f"cgroup v1 {name} controller: {path} is not writable for this user")
    return _CgroupsV1(settings, parents)


def _cgroup_mounts(data: bytes) -> dict[str, tuple[Path, str]]:
    """Map controller (``""`` for version 2) to (mount point, root of the mount within its hierarchy)."""
    mounts: dict[str, tuple[Path, str]] = {}
    for mount in proc_files.mounts(data):
        names = {"cgroup2": ("",), "cgroup": mount.options}.get(mount.kind, ())
        at = Path(os.fsdecode(mount.point)), os.fsdecode(mount.root)
        mounts.update(dict.fromkeys(names, at))
    return mounts


def _directory(mount: tuple[Path, str], membership: str) -> Path:
    point, root = mount
    relative = os.path.relpath(membership, root)
    # In a container the mount may show another part of the hierarchy than our own group.
    path = point if relative.startswith("..") else point / relative
    if not path.is_dir():
        raise LookupError(f"{path} does not exist")
    return path


def _remove_abandoned(parent: Path) -> None:
    """Remove empty groups of services that were killed; the kernel refuses to remove others."""
    for path in parent.glob(f"{_PREFIX}-*"):
        pid = path.name.split("-")[2]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # a straggler's last moments; the next service removes it
        path.rmdir()


def _write(path: Path, value: int | str) -> None:
    path.write_text(str(value))


def _number(path: Path) -> int:
    return proc_files.number(proc_files.read(path))


def _words(path: Path) -> list[str]:
    return [word.decode("ascii") for word in proc_files.words(proc_files.read(path))]


def _pids(path: Path) -> list[int]:
    # Whoever asks must hear when this fails: no process is what an ended sandbox has.
    return [int(word) for word in _words(path)]


def _counter(path: Path, name: str) -> int:
    try:
        return proc_files.counter(proc_files.read(path), name.encode())
    except OSError:  # it only names the limit of a run that has ended; kernels differ in what they count
        return 0
