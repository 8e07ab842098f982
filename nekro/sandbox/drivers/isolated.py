"""Start a process below bubblewrap, which isolates it from the host, and undo a start that fails.

Versions of bubblewrap and setpriv that do not isolate are refused. Bubblewrap gets its arguments when it is
in its control group, and names the first process inside. Whatever fails between the creation of the group and
the end of the start, the started processes are killed and reaped, and the group is removed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from nekro.sandbox.leftovers import end_launch
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.cgroups import Cgroups, Group
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "MINIMUM_VERSION",
    "IsolatedStart",
    "Launched",
    "Tools",
    "explain_denied_call",
    "explain_start_failure",
    "find_tools",
    "isolated_start",
    "memory_file",
    "verify_isolation",
]


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


@dataclass(kw_only=True)
class Launched(ABC):
    """A process that was started and is not known yet to run as intended."""

    process: asyncio.subprocess.Process
    #: Variables in its environment that identify this launch.
    mark: dict[str, str]

    @abstractmethod
    async def words(self) -> str:
        """Return what it printed, for the message of a failed start."""

    async def abandon(self) -> None:
        """Kill and reap it, and end the processes of this launch."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await asyncio.to_thread(end_launch, self.mark)


_Launched = TypeVar("_Launched", bound=Launched)


class IsolatedStart:
    """One start; ``on_failure`` undoes it, and ``descriptors`` closes what is open until it has ended."""

    #: Host id of the first process inside, and its descriptor; from the end of ``run`` on. -1: it has ended.
    first_pid: int
    pidfd: int

    def __init__(
        self,
        group: Group | None,
        on_failure: contextlib.AsyncExitStack,
        descriptors: contextlib.ExitStack,
    ) -> None:
        self.group = group
        self.on_failure = on_failure
        self.descriptors = descriptors

    def hold(self, fd: int) -> int:
        """Close a descriptor when the start has ended."""
        self.descriptors.callback(os.close, fd)
        return fd

    async def run(
        self,
        launch: Callable[[Sequence[str], Sequence[int]], Awaitable[_Launched]],
        tools: Tools,
        arguments: Sequence[str],
        command: Sequence[str],
        *,
        fds: Sequence[int],
        uid: int | None,
        may_end: bool = False,
    ) -> _Launched:
        """Start bubblewrap and, inside, a command; returns bubblewrap.

        Args:
            launch: starts a command line that inherits descriptors.
            arguments: bubblewrap's, without the command.
            fds: descriptors that the arguments name.
            uid: host user of the command; None: that of this service.
            may_end: whether a command that has ended by now is no failure of the start.
        """
        sockets = _StartSockets(self.descriptors)
        # Arguments go through a socket: every user of the host can read the command line of a process.
        line = [tools.bwrap, "--args", str(sockets.arguments_read), "--"]
        line += [*(() if uid is None else _become(tools.setpriv, uid)), *command]
        launched = await launch(line, (*fds, sockets.info_write, sockets.arguments_read))
        self.on_failure.push_async_callback(launched.abandon)
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its output is reported below
                self.group.attach(launched.process.pid)
        # It waits for its arguments and has started nothing yet: all that it starts is in the group, so a
        # service that is killed at any point from here on leaves no process outside of it.
        sockets.send_arguments("\0".join(("--info-fd", str(sockets.info_write), *arguments)).encode())
        self.first_pid = await _first_pid(launched, sockets)
        try:
            self.pidfd = os.pidfd_open(self.first_pid)
        except ProcessLookupError as exc:
            if not may_end:
                raise SandboxUnavailableError(explain_start_failure(await launched.words())) from exc
            self.pidfd = -1
        else:
            self.on_failure.callback(_kill_and_close, self.pidfd)
        return launched


@contextlib.asynccontextmanager
async def isolated_start(cgroups: Cgroups | None) -> AsyncIterator[IsolatedStart]:
    """Yield a start in a control group of its own; whatever fails until the end of the block undoes it.

    Raises:
        SandboxUnavailableError: a call of the system failed.
    """
    async with contextlib.AsyncExitStack() as on_failure:
        try:
            group = None if cgroups is None else cgroups.create()
            if group is not None:
                on_failure.push_async_callback(asyncio.to_thread, group.remove)
            with contextlib.ExitStack() as descriptors:
                yield IsolatedStart(group, on_failure, descriptors)
        except OSError as exc:
            raise SandboxUnavailableError(explain_denied_call(exc)) from exc
        on_failure.pop_all()


def _kill_and_close(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


async def _first_pid(launched: Launched, sockets: _StartSockets) -> int:
    try:
        async with asyncio.timeout(PROGRAM_SECONDS):
            text = await sockets.read_info()
        return int(json.loads(text)["child-pid"])
    except (ValueError, KeyError, TimeoutError) as exc:
        raise SandboxUnavailableError(explain_start_failure(await launched.words())) from exc


class _StartSockets:
    """Two sockets: one carries bubblewrap's arguments, on the other it names the first process.

    Bubblewrap reads its arguments to their end before it does anything else. Without arguments, because
    the service was killed, it finds no command in its empty root and ends.

    Sockets and not pipes: the kernel limits the memory of all pipes of a user, and sandboxed code may
    have that user; and uvloop closes the descriptor of a given pipe twice, and the second time the
    descriptor may belong to another thread.
    """

    def __init__(self, descriptors: contextlib.ExitStack) -> None:
        self._info, self._info_inside = socket.socketpair()
        self._arguments, self._arguments_inside = socket.socketpair()
        # A default timeout of the process would make bubblewrap's reads fail while it waits.
        self._arguments_inside.setblocking(True)
        self.info_write = self._info_inside.fileno()
        self.arguments_read = self._arguments_inside.fileno()
        for end in (self._info, self._info_inside, self._arguments, self._arguments_inside):
            descriptors.callback(end.close)

    def send_arguments(self, arguments: bytes) -> None:
        """Start bubblewrap by sending its arguments.

        Raises:
            OSError: they do not fit into the buffer of a socket.
        """
        self._arguments.setblocking(False)
        # In one step: a part of the arguments would give a sandbox with less isolation.
        if self._arguments.send(arguments) < len(arguments):
            raise OSError(errno.ENOBUFS, f"{len(arguments)} bytes of arguments exceed a socket's buffer")
        self._arguments.close()

    async def read_info(self) -> str:
        """Return the JSON text of ``--info-fd``, read to its end, as it arrives in pieces."""
        self._info_inside.close()
        reader, writer = await asyncio.open_unix_connection(sock=self._info)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()


def verify_isolation(pid: int, *, uid: int, parent: int | None, filters: int = 1) -> None:
    """Read back from the kernel that a process is confined as intended.

    Args:
        parent: process that must have started it; another one means that the id was reused. None: the
            caller knows by a descriptor of the process that it runs.
        filters: least number of seccomp filters; more than one is known since Linux 5.9.

    Raises:
        SandboxUnavailableError: it is another process, runs as another user or as root, keeps a
            capability, may gain privileges, or has too few seccomp filters.
    """
    status = proc_files.read(f"/proc/{pid}/status")
    problems = []
    if parent is not None and int(proc_files.field_of(status, b"PPid")) != parent:
        problems.append(f"process {parent} did not start it")
    users = {int(word) for word in proc_files.field_of(status, b"Uid").split()}
    if users != {uid} or uid == 0:
        problems.append(f"its host users are {sorted(users)}")
    if any(int(proc_files.field_of(status, name), 16) for name in (b"CapEff", b"CapPrm")):
        problems.append("it keeps capabilities")
    if proc_files.field_of(status, b"NoNewPrivs") != b"1":
        problems.append("it may gain privileges")
    if proc_files.field_of(status, b"Seccomp") != b"2":
        problems.append("it has no seccomp filter")
    elif filters > 1 and int(proc_files.field_of(status, b"Seccomp_filters")) < filters:
        problems.append("it has no seccomp filter of its own")
    if problems:
        raise SandboxUnavailableError(f"the sandbox is not isolated: {', '.join(problems)}; no code was run")


def _become(setpriv: str, uid: int) -> list[str]:
    """Return the command that changes to a host user and drops everything that root may do."""
    # The change of user clears the parent-death signal that bubblewrap set; it is set again
    # here, as sandboxes would otherwise outlive a killed service.
    return [
        setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--no-new-privs",
        "--bounding-set", "-all", "--inh-caps", "-all", "--ambient-caps", "-all", "--pdeathsig", "KILL",
    ]  # fmt: skip


def memory_file(name: str, data: bytes) -> int:
    """Return a descriptor of a file in memory, positioned at its start; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
