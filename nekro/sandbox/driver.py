"""The port between the sandbox manager and the drivers, and the values that drivers report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from nekro.sandbox.models import Limit
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "Capability",
    "Enforcement",
    "Enforcer",
    "ExitStatus",
    "IsolationCheck",
    "Sandbox",
    "SandboxDriver",
    "SandboxSpec",
    "Usage",
    "check_of",
]


@dataclass(frozen=True, kw_only=True)
class IsolationCheck:
    """The result of checking one part of the isolation on this machine."""

    name: str
    ok: bool
    detail: str
    #: Suggested fix when it is not ok; empty otherwise.
    fix: str = ""
    #: Whether the driver is useless without it.
    needed: bool = True


def check_of(name: str, look: Callable[[], str]) -> IsolationCheck:
    """Return the check for an attempt: ok with its result, or failed with the error that it raised."""
    try:
        return IsolationCheck(name=name, ok=True, detail=look())
    except SandboxUnavailableError as exc:
        return IsolationCheck(name=name, ok=False, detail=str(exc))


class Enforcer(StrEnum):
    """Who enforces a limit."""

    KERNEL = "kernel"
    #: A timer or a counter of this process, which a run cannot exceed.
    HOST = "host"
    #: A periodic check: between two checks a run may exceed the limit.
    POLLED = "polled"
    #: The limit is not enforced for a run as a whole.
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True)
class Enforcement:
    """One limit, and who enforces it."""

    #: memory, swap, pids, cpu, disk, inodes, file_size, wall or output.
    limit: str
    by: Enforcer
    detail: str
    #: How to make the kernel enforce it; "" where no fix is needed.
    fix: str = ""
    #: Whether a service must not start unless the kernel or the host enforces it.
    required: bool = False

    @property
    def ok(self) -> bool:
        """Whether a run cannot exceed it."""
        return self.by in (Enforcer.KERNEL, Enforcer.HOST)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a driver provides on this machine, determined by running a sandbox."""

    driver: str
    checks: tuple[IsolationCheck, ...]
    #: The enforcement of each limit of a run.
    limits: tuple[Enforcement, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether code may be run by it, within the limits that the settings require."""
        return all(check.ok for check in self.checks if check.needed) and all(
            limit.ok for limit in self.limits if limit.required
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the driver cannot be used, each reason with its fix."""
        failed = [check for check in self.checks if check.needed and not check.ok]
        reasons = [f"{c.name}: {c.detail}" + (f" ({c.fix})" if c.fix else "") for c in failed]
        reasons += [
            f"limit {limit.limit} is enforced by {limit.by}: {limit.detail} ({limit.fix})"
            for limit in self.limits
            if limit.required and not limit.ok
        ]
        return tuple(reasons)


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What one sandbox sees of the host."""

    #: Appears as ``/app/shared``, writable.
    shared_dir: Path
    #: Appears as ``/app/uploads``, read-only.
    uploads_dir: Path
    #: Host user id of the code where the driver can choose one.
    uid: int
    #: Package directories, read-only, in ``sys.path`` order.
    layers: tuple[Path, ...] = ()
    #: Whether the kernel limits the bytes and inodes of ``shared_dir``; else it is measured.
    shared_bounded: bool = False
    #: Modules imported before the code is known.
    preload: tuple[str, ...] = ()
    #: Whether internet sockets are allowed; they reach only the sandbox's own loopback.
    loopback: bool = False
    #: Whether it may be forked from a process that has been prepared for sandboxes of this kind.
    may_fork: bool = True
    #: Whether its code seems to import packages; else it is forked from a smaller process without them.
    imports_packages: bool = True


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a sandbox used so far; None where this machine cannot measure it."""

    memory_bytes: int | None = None
    processes: int | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """How a sandbox's process ended, as the host saw it."""

    #: As a shell reports it: the process's own exit code, or 128 + signal.
    code: int
    #: The limit that the kernel says it hit; None when none or unknown.
    limit: Limit | None = None


class Sandbox(Protocol):
    """A started sandbox that has sent HELLO and waits for its code."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    spec: SandboxSpec
    #: Called once, after the sandbox is closed.
    on_close: list[Callable[[], object]]
    #: Host directory that is the code's ``/tmp``; None where ``/tmp`` has a size limit of its own.
    scratch_dir: Path | None
    #: Whether the kernel counts its processes together with others of this service's user.
    shares_user: bool
    #: Whether it was forked from a prepared process.
    is_forked: bool

    @property
    def output(self) -> asyncio.StreamReader:
        """Stdout and stderr of everything inside, as one stream."""
        ...

    @property
    def memory_bounded(self) -> bool:
        """Whether the kernel bounds the memory of all processes together."""
        ...

    @property
    def alive(self) -> bool:
        """Whether its first process still runs; may be asked from any thread."""
        ...

    async def drain(self) -> None:
        """Wait until all that was printed so far has been read from ``output``."""
        ...

    async def wait(self) -> ExitStatus:
        """Wait until every process inside is gone."""
        ...

    def kill(self) -> None:
        """Kill every process inside. Returns at once; safe from any thread and after the end."""
        ...

    def usage(self) -> Usage:
        """Return what it uses now."""
        ...

    def processes(self) -> list[int]:
        """Return the host ids of every process inside.

        Raises:
            OSError: they cannot be listed; an empty list means that none is left, or that this
                driver leaves them to its engine.
        """
        ...

    async def close(self) -> None:
        """Kill remaining processes, wait for them, release all resources; may be called twice."""
        ...


class SandboxDriver(Protocol):
    """Starts sandboxes in one particular way."""

    name: str
    #: Seed of the interpreter's hashes, the same on all hosts of an installation: sets of texts have the same
    #: order when a program is run again. A seed per process prevents that others slow a program down by keys
    #: with equal hashes. This one does so too: it derives from the signing key, so only the code itself knows
    #: it, and a run's limits bound what such keys could cost.
    hash_seed: int

    async def examine(self) -> tuple[IsolationCheck, ...]:
        """Check the requirements without running a sandbox; does not raise for missing ones."""
        ...

    async def limits(self) -> tuple[Enforcement, ...]:
        """Return who enforces memory, swap, processes and CPU of a run; does not raise for missing limits."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox and return it when it is ready for code.

        Raises:
            SandboxUnavailableError: it cannot be started; the message names reason and fix.
        """
        ...

    async def close(self) -> None:
        """Release resources that outlive single sandboxes."""
        ...
