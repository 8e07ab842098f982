"""Control groups: the kernel's limits on memory, swap, processes and CPU of a run as a whole.

Version 2 where a writable subtree with the controllers is delegated to this service, else
version 1 as root. Every limit is written and read back, once in ``find_cgroups`` and again for
every group; ``Cgroups.missing`` names limits that this kernel does not enforce. Without either
version, the caller falls back to resource limits, a stricter seccomp filter and the watchdog, and
``nekro doctor`` reports it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import IsolationCheck, Usage
from nekro.sandbox.leftovers import ServiceId, own_id
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.cgroup_files import (
    KILL_POLL_SECONDS,
    counter,
    group_mounts,
    kill_all,
    number,
    open_all,
    own_directory,
    pids_in,
    set_and_verify,
    words,
    write,
)
from nekro.sandbox.models import GONE_SECONDS, Limit

__all__ = ["DELEGATE", "Cgroups", "Group", "find_cgroups"]

#: Version 2 forbids processes in a group that has child groups: the service moves into this leaf.
_SERVICE_LEAF: Final = "nekro-service"
_PREFIX: Final = "nekro-run"
_CPU_PERIOD_MICROSECONDS: Final = 100_000
#: The process that starts a sandbox is a member of its group too.
_LAUNCHERS: Final = 1
#: One counter per process: several drivers create groups in the same directory.
_numbers: Final = itertools.count()
_NEEDED: Final = ("memory", "pids")
DELEGATE: Final = (
    "delegate a cgroup to this service (systemd: Delegate=yes; containers: docs/operations.md)"
    " or run it as root"
)


class Group(ABC):
    """The control group of one sandbox."""

    @abstractmethod
    def attach(self, pid: int) -> None:
        """Put a process, and the processes that it starts from now on, under the limits."""

    @abstractmethod
    def entries(self) -> list[int]:
        """Return descriptors; a process that writes "0" to each enters the group. The caller closes them."""

    @abstractmethod
    def limit_hit(self) -> Limit | None:
        """Return the limit that the kernel enforced by killing or refusing; None when none."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what the group uses now."""

    @abstractmethod
    def processes(self) -> list[int]:
        """Return the host ids of the group's processes."""

    def is_populated(self) -> bool:
        """Whether it has processes; False when the group does not exist."""
        try:
            return bool(self.processes())
        except OSError:
            return False

    @abstractmethod
    def kill(self) -> bool:
        """Kill every process of the group and wait; False when some still run after 10 s."""

    @abstractmethod
    def _rmdir(self) -> None: ...

    def remove(self) -> bool:
        """Kill remaining processes and remove the group; False when that failed. Idempotent."""
        with contextlib.suppress(OSError):
            self._rmdir()
            return True
        if not self.kill():
            return False
        deadline = time.monotonic() + GONE_SECONDS
        while True:  # a killed process leaves its group shortly after it is no longer listed
            try:
                self._rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(KILL_POLL_SECONDS)
            else:
                return True


@dataclass(frozen=True, kw_only=True)
class _Knob:
    """One control file, and the value that bounds a run."""

    #: Name of the limit: memory, swap, pids or cpu.
    limit: str
    #: ``""`` on version 2, where one directory holds all files.
    controller: str
    file: str
    value: int | str


class Cgroups(ABC):
    """Creates groups with one version of the kernel's interface."""

    #: ``cgroup v1`` or ``cgroup v2``.
    name: str

    def __init__(self, parents: Mapping[str, Path], knobs: tuple[_Knob, ...]) -> None:
        """
        Raises:
            OSError: memory or processes cannot be bounded.
        """
        self._parents = parents
        self._sweep()
        #: Limits that this kernel does not enforce, each with the reason.
        self.missing: Mapping[str, str] = self._try_each(knobs)
        for limit in _NEEDED:
            if limit in self.missing:
                raise OSError(self.missing[limit])
        self._knobs = tuple(knob for knob in knobs if knob.limit not in self.missing)

    def create(self) -> Group:
        """Create a group with the limits of the settings, each read back.

        Raises:
            OSError: the kernel refused, or keeps another value; the group was removed.
        """
        paths = self._make()
        try:
            for knob in self._knobs:
                set_and_verify(paths[knob.controller] / knob.file, knob.value)
        except BaseException:
            self._group(paths).remove()
            raise
        return self._group(paths)

    @abstractmethod
    def _group(self, paths: Mapping[str, Path]) -> Group: ...

    def _make(self) -> Mapping[str, Path]:
        owner = own_id()
        # Control groups do not outlive a boot, so three of the five parts of a service id are enough.
        name = f"{_PREFIX}-{owner.pid}-{owner.started}-{owner.namespace}-{next(_numbers)}"
        paths = {controller: parent / name for controller, parent in self._parents.items()}
        try:
            for path in set(paths.values()):  # version 1 often has cpu and cpuacct in one hierarchy
                path.mkdir()
        except BaseException:
            self._group(paths).remove()
            raise
        return paths

    def _try_each(self, knobs: tuple[_Knob, ...]) -> dict[str, str]:
        paths = self._make()
        missing: dict[str, str] = {}
        for knob in knobs:
            try:
                set_and_verify(paths[knob.controller] / knob.file, knob.value)
            except KeyError:
                missing[knob.limit] = f"{self.name} has no {knob.controller} controller here"
            except OSError as exc:
                missing[knob.limit] = str(exc)
        self._group(paths).remove()
        return missing

    def _sweep(self) -> None:
        """Kill and remove the groups of services that have ended."""
        names = {path.name for parent in self._parents.values() for path in parent.glob(f"{_PREFIX}-*")}
        for name in names:
            owner = _owner_of(name)
            if owner is not None and owner.is_gone(still_runs=True):
                found = {key: parent / name for key, parent in self._parents.items()}
                self._group({key: path for key, path in found.items() if path.is_dir()}).remove()


def _owner_of(name: str) -> ServiceId | None:
    pid, started, namespace, *_ = [*name.removeprefix(f"{_PREFIX}-").split("-"), "", ""]
    own = own_id()
    return ServiceId.parse(f"{own.host}/{own.boot}/{namespace}/{pid}/{started}")


@dataclass(frozen=True)
class _GroupV1(Group):
    paths: Mapping[str, Path]

    def attach(self, pid: int) -> None:
        for path in self.paths.values():
            write(path / "cgroup.procs", pid)

    def entries(self) -> list[int]:
        return open_all(path / "cgroup.procs" for path in self.paths.values())

    def limit_hit(self) -> Limit | None:
        if counter(self.paths["memory"] / "memory.oom_control", "oom_kill"):
            return Limit.MEMORY
        return Limit.PIDS if counter(self.paths["pids"] / "pids.events", "max") else None

    def usage(self) -> Usage:
        cpu = self.paths.get("cpuacct")
        return Usage(
            memory_bytes=number(self.paths["memory"] / "memory.usage_in_bytes"),
            processes=number(self.paths["pids"] / "pids.current"),
            cpu_seconds=number(cpu / "cpuacct.usage") / 1e9 if cpu else None,
        )

    def processes(self) -> list[int]:
        return pids_in(self.paths["memory"] / "cgroup.procs")

    def kill(self) -> bool:
        with contextlib.suppress(KeyError, OSError):
            write(self.paths["pids"] / "pids.max", 0)  # prevents further forks
        return kill_all(
            lambda: [pid for path in self.paths.values() for pid in pids_in(path / "cgroup.procs")]
        )

    def _rmdir(self) -> None:
        for path in self.paths.values():
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()


class _CgroupsV1(Cgroups):
    name = "cgroup v1"

    def _group(self, paths: Mapping[str, Path]) -> Group:
        return _GroupV1(paths)


@dataclass(frozen=True)
class _GroupV2(Group):
    path: Path

    def attach(self, pid: int) -> None:
        write(self.path / "cgroup.procs", pid)

    def entries(self) -> list[int]:
        return open_all([self.path / "cgroup.procs"])

    def limit_hit(self) -> Limit | None:
        if counter(self.path / "memory.events", "oom_kill"):
            return Limit.MEMORY
        return Limit.PIDS if counter(self.path / "pids.events", "max") else None

    def usage(self) -> Usage:
        return Usage(
            memory_bytes=number(self.path / "memory.current"),
            processes=number(self.path / "pids.current"),
            cpu_seconds=counter(self.path / "cpu.stat", "usage_usec") / 1e6,
        )

    def processes(self) -> list[int]:
        return pids_in(self.path / "cgroup.procs")

    def kill(self) -> bool:
        with contextlib.suppress(OSError):
            write(self.path / "pids.max", 0)
        with contextlib.suppress(OSError):  # since Linux 5.14
            write(self.path / "cgroup.kill", 1)
        return kill_all(self.processes)

    def _rmdir(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()


class _CgroupsV2(Cgroups):
    name = "cgroup v2"

    def _group(self, paths: Mapping[str, Path]) -> Group:
        return _GroupV2(paths[""])


def find_cgroups(
    settings: SandboxSettings, *, proc: Path = Path("/proc/self")
) -> tuple[Cgroups | None, IsolationCheck]:
    """Find control groups that this service may write; remove those of services that have ended.

    Args:
        proc: where to read ``cgroup`` and ``mountinfo``; tests point it elsewhere.

    Returns:
        The groups, None when there are none, and the line for ``nekro doctor``.
    """
    mounts = group_mounts(proc_files.read(proc / "mountinfo"))
    own = proc_files.memberships(proc_files.read(proc / "cgroup"))
    reasons = []
    for attempt in (_try_v2, _try_v1):
        try:
            found = attempt(settings, mounts, own)
        except (OSError, LookupError) as exc:
            reasons.append(str(exc))
            continue
        kept = [limit for limit in ("memory", "swap", "pids", "cpu") if limit not in found.missing]
        detail = f"{found.name} bounds {', '.join(kept)}"
        return found, IsolationCheck(name="control groups", ok=True, detail=detail)
    return None, IsolationCheck(
        name="control groups",
        ok=False,
        detail="; ".join(reasons),
        fix=f"{DELEGATE}; until then a watchdog bounds memory, up to its polling interval",
        needed=False,
    )


def _try_v2(
    settings: SandboxSettings, mounts: Mapping[str, tuple[Path, str]], own: Mapping[str, str]
) -> Cgroups:
    here = own_directory("", mounts, own)
    parent = here.parent if here.name == _SERVICE_LEAF else here
    missing = set(_NEEDED) - set(words(parent / "cgroup.controllers"))
    if missing:
        raise LookupError(f"cgroup v2 has no {' and no '.join(sorted(missing))} controller here")
    enabled = set(words(parent / "cgroup.subtree_control"))
    if not set(_NEEDED) <= enabled:
        _enable_controllers(parent)
    knobs = (
        _Knob(limit="memory", controller="", file="memory.max", value=settings.memory_bytes),
        _Knob(limit="swap", controller="", file="memory.swap.max", value=0),
        _Knob(limit="pids", controller="", file="pids.max", value=settings.max_processes + _LAUNCHERS),
        _Knob(
            limit="cpu",
            controller="",
            file="cpu.max",
            value=f"{_CPU_PERIOD_MICROSECONDS} {_CPU_PERIOD_MICROSECONDS}",
        ),
    )
    return _CgroupsV2({"": parent}, knobs)


def _enable_controllers(parent: Path) -> None:
    leaf = parent / _SERVICE_LEAF
    leaf.mkdir(exist_ok=True)
    for pid in pids_in(parent / "cgroup.procs"):
        with contextlib.suppress(ProcessLookupError):
            write(leaf / "cgroup.procs", pid)
    available = words(parent / "cgroup.controllers")
    wanted = [name for name in (*_NEEDED, "cpu") if name in available]
    write(parent / "cgroup.subtree_control", " ".join(f"+{name}" for name in wanted))


def _try_v1(
    settings: SandboxSettings, mounts: Mapping[str, tuple[Path, str]], own: Mapping[str, str]
) -> Cgroups:
    parents = {name: own_directory(name, mounts, own) for name in _NEEDED}
    for name in ("cpu", "cpuacct"):
        with contextlib.suppress(LookupError):
            parents[name] = own_directory(name, mounts, own)
    for name, path in parents.items():
        if not os.access(path, os.W_OK):
            raise LookupError(f"cgroup v1 {name} controller: {path} is not writable for this user")
    memory, cpu = settings.memory_bytes, _CPU_PERIOD_MICROSECONDS
    knobs = (
        _Knob(limit="memory", controller="memory", file="memory.limit_in_bytes", value=memory),
        # Memory and swap together: the same bound leaves nothing to swap.
        _Knob(limit="swap", controller="memory", file="memory.memsw.limit_in_bytes", value=memory),
        _Knob(limit="pids", controller="pids", file="pids.max", value=settings.max_processes + _LAUNCHERS),
        _Knob(limit="cpu", controller="cpu", file="cpu.cfs_period_us", value=cpu),
        _Knob(limit="cpu", controller="cpu", file="cpu.cfs_quota_us", value=cpu),
    )
    return _CgroupsV1(parents, knobs)
