"""Runs programs that an operator installed, such as MCP servers, each in a sandbox of its own.

Unlike code of the LLM, such a program is chosen by the operator and speaks over its standard streams. It is
confined all the same, because it handles hostile input and its supplier may change it: read-only system,
its own home, declared files, no network unless declared, no environment but the declared one, a filter of
system calls, limits on memory and processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from loguru import logger

from broker_config.secret_files import refuse_secret_path
from broker_config.settings import SandboxSettings
from nekro.base.tasks import clean_up_timeout
from nekro.sandbox.drivers.bwrap_args import ProgramSpec, environment_inside, program_arguments, visible_paths
from nekro.sandbox.drivers.isolated import (
    Launched,
    Tools,
    find_tools,
    isolated_start,
    memory_file,
    verify_isolation,
)
from nekro.sandbox.filter.calls import PROGRAMS
from nekro.sandbox.filter.seccomp import build_filter, filter_fd
from nekro.sandbox.leftovers import end_launch, end_orphans, launch_mark
from nekro.sandbox.limits.cgroups import Cgroups, Group, find_cgroups
from nekro.sandbox.limits.processes import processes_beside, usage_of
from nekro.sandbox.users import UserHold, hold_user
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import InvalidValueError, SandboxUnavailableError
from nekro_agent.execution.tied_process import tied_to_this_process
from nekro_agent.files import safe_files

__all__ = ["Confinement", "Program", "ProgramSpec", "ProgramStarter"]

#: How long a program whose input was closed may take to end by itself.
_END_SECONDS: Final = 2.0
_MOST_DESCRIPTORS: Final = 1024
_MOST_FILE_BYTES: Final = 2 << 30
#: Bytes that the event loop reads ahead of one stream.
_READ_AHEAD_BYTES: Final = 256 << 10
_ALONE: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """How a program is confined, for people."""

    isolated: bool
    #: Host process id of its first process.
    process: int
    #: Host user id.
    user: int
    network: bool
    #: Who bounds the memory: the kernel, a check every second, or nothing.
    memory: str
    #: ``path (ro)`` or ``path (rw)``.
    files: tuple[str, ...]


@dataclass(kw_only=True)
class Program:
    """A running program; its standard streams are those of ``process``."""

    process: asyncio.subprocess.Process
    confinement: Confinement
    memory_bytes: int
    #: First process inside; the process itself when it is not isolated.
    first_pid: int
    #: Of the first process; -1: it had ended when the start was complete, and with it all others inside.
    _pidfd: int
    _group: Group | None = None
    _hold: UserHold | None = None
    _mark: dict[str, str] = field(default_factory=dict)
    _is_closed: bool = False

    def verify(self) -> None:
        """Read back from the kernel that the program is isolated; it must have begun to answer.

        Raises:
            SandboxUnavailableError: it is not.
        """
        if self.confinement.isolated:
            verify_isolation(self.first_pid, uid=self.confinement.user, parent=self.process.pid)

    def is_too_large(self) -> bool:
        """Whether it uses more memory than it may; always False where the kernel or nothing bounds it."""
        if self._group is not None or not self.confinement.isolated:
            return False
        used = usage_of(processes_beside(self.first_pid)).memory_bytes
        return used is not None and used > self.memory_bytes

    def kill(self) -> None:
        """Kill every process of the program."""
        with contextlib.suppress(ProcessLookupError, OSError):
            if self.confinement.isolated:
                if self._pidfd >= 0:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close its input, kill what is left after a moment, and release everything."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.process.stdin is not None:
            self.process.stdin.close()
        # The end of a process is not seen before its output has been read to the end.
        rest = [
            asyncio.create_task(_read_rest(stream)) for stream in (self.process.stdout, self.process.stderr)
        ]
        try:
            with contextlib.suppress(TimeoutError):
                async with clean_up_timeout(_END_SECONDS):
                    await self.process.wait()
        finally:
            # Also after a regular end: processes that it started may be left.
            self.kill()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            await asyncio.shield(self._release(rest))

    async def _release(self, rest: list[asyncio.Task[None]]) -> None:
        try:
            async with clean_up_timeout(PROGRAM_SECONDS):
                await self.process.wait()
                await asyncio.gather(*rest)
        except TimeoutError:
            self.process.kill()
            for task in rest:
                task.cancel()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
        elif self._mark:
            await asyncio.to_thread(end_launch, self._mark)
        if self._hold is not None:
            self._hold.release()


class ProgramStarter:
    """Starts programs with bubblewrap."""

    def __init__(self, settings: SandboxSettings, *, search_path: str | None = None) -> None:
        """
        Args:
            search_path: where to look for ``bwrap`` and ``setpriv``; None means ``PATH``.
        """
        self._settings = settings
        self._search_path = search_path
        self._has_swept = False
        self.root_mode = os.geteuid() == 0

    @cached_property
    def tools(self) -> Tools:
        """The programs that isolate.

        Raises:
            SandboxUnavailableError: one is missing, too old or setuid.
        """
        return find_tools(self._search_path, root_mode=self.root_mode)

    async def start(self, spec: ProgramSpec) -> Program:
        """Start a program in a sandbox; the first time, end what killed services left of their starts.

        Raises:
            SandboxUnavailableError: it cannot be started, or not be isolated.
            InvalidValueError: it would see a secret of the host, or names what this host does not have.
        """
        if not self._has_swept:
            self._has_swept = True
            if ended := await asyncio.to_thread(end_orphans):
                logger.bind(count=ended).warning("sandbox_orphans_ended")
        for path in spec.files:
            if not path.exists():
                raise InvalidValueError(f"the declared path {path} does not exist on this host")
        executable = await asyncio.to_thread(_find_executable, spec)
        hold = hold_user(spec.key, settings=self._settings)
        try:
            return await self._start(spec, executable, hold)
        except BaseException:
            hold.release()
            raise

    async def start_unconfined(self, spec: ProgramSpec) -> Program:
        """Start a program without isolation, in its own session.

        Raises:
            InvalidValueError: there is no such program.
            SandboxUnavailableError: it cannot be started.
        """
        executable = await asyncio.to_thread(_find_executable, spec)
        variables = environment_inside(spec, executable) | {"HOME": str(spec.home)}
        del variables["TMPDIR"]
        try:
            command = tied_to_this_process(str(executable), *spec.command[1:])
            process = await _run(command, env=variables, cwd=str(spec.home))
        except OSError as exc:
            raise SandboxUnavailableError(f"{executable} cannot be started: {exc.strerror}") from exc
        return Program(
            process=process,
            confinement=Confinement(
                isolated=False,
                process=process.pid,
                user=os.geteuid(),
                network=True,
                memory="nothing",
                files=(),
            ),
            memory_bytes=spec.memory_bytes,
            first_pid=process.pid,
            _pidfd=os.pidfd_open(process.pid),
        )

    async def _start(self, spec: ProgramSpec, executable: Path, hold: UserHold) -> Program:
        cgroups = await asyncio.to_thread(self._cgroups, spec)
        async with isolated_start(cgroups) as start:
            group, mark = start.group, launch_mark()
            await asyncio.to_thread(_give_home, spec.home, hold.uid)
            fds = [start.hold(fd) for fd in self._descriptors(spec, hold.uid, strict=group is None)]
            visible = visible_paths(spec, executable)
            pinned = await asyncio.to_thread(_pinned, visible, spec.secrets, start.descriptors)
            by_fd = pinned if self.tools.binds_descriptors else {}
            arguments = program_arguments(
                spec,
                executable,
                visible=visible,
                descriptors=by_fd,
                seccomp_fd=fds[0],
                passwd_fd=fds[1],
                root_mode=self.root_mode,
                zero_device=group is not None,
            )
            if "\0" in "".join(arguments):  # a value would become further arguments
                raise InvalidValueError("its declaration has a value with a NUL character")
            launched = await start.run(
                partial(_launch, mark=mark),
                self.tools,
                arguments,
                [*_limits(spec, has_group=group is not None), str(executable), *spec.command[1:]],
                fds=[*fds, *by_fd.values()],
                uid=hold.uid if self.root_mode else None,
                may_end=True,  # who reads its output says how
            )
            return Program(
                process=launched.process,
                confinement=_confinement(spec, hold.uid, group, start.first_pid),
                memory_bytes=spec.memory_bytes,
                first_pid=start.first_pid,
                _pidfd=start.pidfd,
                _group=group,
                _hold=hold,
                _mark=mark,
            )

    def _cgroups(self, spec: ProgramSpec) -> Cgroups | None:
        limits = {"memory_bytes": spec.memory_bytes, "max_processes": spec.max_processes}
        return find_cgroups(self._settings.model_copy(update=limits))[0]

    def _descriptors(self, spec: ProgramSpec, uid: int, *, strict: bool) -> tuple[int, int]:
        families = (*_ALONE, socket.AF_NETLINK) if spec.network else _ALONE
        program = build_filter(strict_memory=strict, families=families, also=PROGRAMS)
        inside = uid if self.root_mode else 65534
        passwd = f"root:x:0:0::/:/bin/false\nprogram:x:{inside}:{inside}::/home/program:/bin/false\n"
        return filter_fd(program), memory_file("passwd", passwd.encode())


@dataclass(kw_only=True)
class _LaunchedProgram(Launched):
    async def words(self) -> str:
        words = b""
        if self.process.stderr is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    words = await self.process.stderr.read(4096)
        return words.decode("utf-8", "replace")


async def _launch(command: Sequence[str], fds: Sequence[int], *, mark: dict[str, str]) -> _LaunchedProgram:
    return _LaunchedProgram(process=await _run(command, env=mark, cwd="/", pass_fds=fds), mark=mark)


async def _run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        env=env,
        cwd=cwd,
        limit=_READ_AHEAD_BYTES,
        start_new_session=True,
    )


async def _read_rest(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(_READ_AHEAD_BYTES):
        pass


def _find_executable(spec: ProgramSpec) -> Path:
    """Return the path of the program's executable on the host.

    Raises:
        InvalidValueError: there is none; the message names it.
    """
    name = spec.command[0]
    found = shutil.which(name, path=spec.environment.get("PATH"))
    if found is None:
        raise InvalidValueError(
            f"there is no program {name!r} on this host; install it, or give its absolute path"
        )
    return Path(found).absolute()


def _pinned(
    paths: Iterable[Path], secrets: Mapping[Path, str], descriptors: contextlib.ExitStack
) -> dict[Path, int]:
    """Open the paths that a program sees; ``descriptors`` closes them.

    Programs may exchange links in paths that they may write, so what is checked is what was opened.

    Raises:
        InvalidValueError: one is, contains or lies in a secret.
    """
    pinned: dict[Path, int] = {}
    for path in paths:
        fd = pinned[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        descriptors.callback(os.close, fd)
        refuse_secret_path(path, secrets, target=Path(os.readlink(f"/proc/self/fd/{fd}")))
    return pinned


def _confinement(spec: ProgramSpec, uid: int, group: Group | None, process: int) -> Confinement:
    files = tuple(f"{path} ({'rw' if writable else 'ro'})" for path, writable in spec.files.items())
    memory = "a check every second" if group is None else "the kernel"
    return Confinement(
        isolated=True, process=process, user=uid, network=spec.network, memory=memory, files=files
    )


def _limits(spec: ProgramSpec, *, has_group: bool) -> list[str]:
    """Return the command that sets limits of single processes; empty where there is none."""
    prlimit = shutil.which("prlimit", path="/usr/bin:/bin")
    if prlimit is None:
        return []
    # Where no control group bounds processes, the limit of the host user does.
    processes = [] if has_group else [f"--nproc={spec.max_processes}"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    descriptors = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    # A core size of 1 and not 0: 0 does not stop a core pattern that is a pipe.
    return [
        prlimit, "--core=1:1", f"--nofile={descriptors}:{descriptors}",
        f"--fsize={_MOST_FILE_BYTES}:{_MOST_FILE_BYTES}", *processes, "--",
    ]  # fmt: skip


def _give_home(home: Path, uid: int) -> None:
    """Let a host user own a program's home; its files may belong to the user of an earlier start."""
    if os.geteuid() != 0:
        return
    # Bubblewrap enters it as root without the right to enter others' directories. A program of an earlier
    # start may still run and exchange its directories for links.
    safe_files.give_tree(home, uid=uid, gid=uid, mode=0o711)
