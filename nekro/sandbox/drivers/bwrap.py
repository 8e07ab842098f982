"""Isolation by bubblewrap, the default driver.

The user of this service selects one of two modes. As an ordinary user: a user namespace, and the
code's host user is the service's own. As root: no user namespace, and ``setpriv`` changes to a user
of the pool before the interpreter starts, because host root inside a user namespace is still host
root to files and kernel settings outside. Before a sandbox counts as started, its host user,
capabilities and seccomp mode are read back from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import platform
import signal
import socket
from functools import cached_property
from pathlib import Path

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Check, Enforcement, SandboxSpec
from nekro.sandbox.drivers.bwrap_args import LAYERS_INSIDE, BwrapFds, bwrap_arguments
from nekro.sandbox.drivers.bwrap_tools import Tools, find_tools
from nekro.sandbox.drivers.checks import check_of, describe_interpreter
from nekro.sandbox.drivers.hints import explain_denied_call, explain_start_failure
from nekro.sandbox.drivers.process import Launched, ProcessSandbox, expect_hello, launch
from nekro.sandbox.filter.seccomp import build_filter, filter_fd
from nekro.sandbox.interpreter import (
    PROGRAM_INSIDE,
    Access,
    Interpreter,
    encode_config,
    find_interpreter,
    guest_program,
)
from nekro.sandbox.limits import proc_files
from nekro.sandbox.limits.cgroups import Cgroups, Group, find_cgroups
from nekro.sandbox.limits.enforcement import group_limits
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["BwrapDriver", "StartSockets", "become", "memory_file", "verify_isolation"]


class BwrapDriver:
    """Starts sandboxes with bubblewrap."""

    name = "bwrap"

    def __init__(self, settings: SandboxSettings, *, search_path: str | None = None) -> None:
        """
        Args:
            search_path: where to look for ``bwrap`` and ``setpriv``; None means ``PATH``.
        """
        self._settings = settings
        self._search_path = search_path
        self.root_mode = os.geteuid() == 0

    @cached_property
    def tools(self) -> Tools:
        """The programs that it starts; searched for once.

        Raises:
            SandboxUnavailableError: one is missing, too old or setuid.
        """
        return find_tools(self._search_path, root_mode=self.root_mode)

    @cached_property
    def interpreter(self) -> Interpreter:
        """The Python inside; searched for once.

        Raises:
            SandboxUnavailableError: none fits.
        """
        return find_interpreter(self._settings.python, access=Access.BOUND if self.root_mode else Access.OWN)

    @cached_property
    def _cgroups(self) -> tuple[Cgroups | None, Check]:
        return find_cgroups(self._settings)

    @cached_property
    def _filter(self) -> bytes:
        return build_filter(strict_memory=self._cgroups[0] is None)

    @cached_property
    def _loopback_filter(self) -> bytes:
        families = (socket.AF_UNIX, socket.AF_INET)
        return build_filter(strict_memory=self._cgroups[0] is None, families=families)

    @cached_property
    def _runner(self) -> bytes:
        return guest_program(self.interpreter.version)

    async def examine(self) -> tuple[Check, ...]:
        """Check the programs, the interpreter and the kernel's features."""
        return await asyncio.to_thread(self._examine)

    def _examine(self) -> tuple[Check, ...]:
        mode = "root mode: code runs as a host user of the pool" if self.root_mode else "user mode"
        return (
            check_of("bubblewrap", lambda: f"{self.tools.bwrap} {self.tools.version}, {mode}"),
            check_of("interpreter", lambda: describe_interpreter(self.interpreter)),
            check_of("seccomp", lambda: f"{len(self._filter) // 8} instructions for {platform.machine()}"),
            self._cgroups[1],
            Check(name="network", ok=True, detail="own namespace, and no sockets but AF_UNIX ones"),
        )

    async def limits(self) -> tuple[Enforcement, ...]:
        """Return which limits the control groups enforce."""
        return group_limits((await asyncio.to_thread(lambda: self._cgroups))[0])

    async def start(self, spec: SandboxSpec) -> ProcessSandbox:
        """Start a sandbox and return it when it is ready for code.

        Raises:
            SandboxUnavailableError: it cannot be started, or it is not isolated as intended.
        """
        cgroups, _ = self._cgroups
        async with contextlib.AsyncExitStack() as on_failure:
            with contextlib.ExitStack() as descriptors:
                try:
                    sandbox = await self._start(spec, cgroups, on_failure, descriptors)
                except OSError as exc:
                    raise SandboxUnavailableError(explain_denied_call(exc)) from exc
            on_failure.pop_all()
            return sandbox

    async def close(self) -> None:
        """Nothing outlives single sandboxes."""

    async def _start(
        self,
        spec: SandboxSpec,
        cgroups: Cgroups | None,
        on_failure: contextlib.AsyncExitStack,
        descriptors: contextlib.ExitStack,
    ) -> ProcessSandbox:
        group = cgroups.create() if cgroups else None
        if group:
            on_failure.push_async_callback(asyncio.to_thread, group.remove)
        sockets = StartSockets(descriptors)
        ours, theirs = socket.socketpair()
        on_failure.callback(ours.close)
        descriptors.callback(theirs.close)
        command, arguments, inherited = self._command_line(spec, sockets, theirs.fileno(), descriptors)
        launched = await launch(command, channel=theirs, ours=ours, pass_fds=inherited)
        try:
            return await self._complete(spec, launched, sockets, group, arguments)
        except BaseException:
            await launched.abandon()
            raise

    def _command_line(
        self, spec: SandboxSpec, sockets: StartSockets, channel_fd: int, descriptors: contextlib.ExitStack
    ) -> tuple[list[str], bytes, list[int]]:
        """Return the command, its arguments, and the descriptors that it inherits.

        ``descriptors`` closes the descriptors.
        """

        def hold(fd: int) -> int:
            descriptors.callback(os.close, fd)
            return fd

        by_fd = self.tools.binds_descriptors
        fds = BwrapFds(
            seccomp=hold(filter_fd(self._loopback_filter if spec.loopback else self._filter)),
            runner=hold(memory_file("runner", self._runner)),
            info=sockets.info_write,
            shared=hold(_open_directory(spec.shared_dir)) if by_fd else None,
            uploads=hold(_open_directory(spec.uploads_dir)) if by_fd else None,
        )
        arguments = bwrap_arguments(
            spec,
            settings=self._settings,
            interpreter=self.interpreter,
            fds=fds,
            root_mode=self.root_mode,
            zero_device=self._cgroups[0] is not None,
        )
        # Arguments go through a socket: every user of the host can read the command line of a process.
        command = [
            self.tools.bwrap, "--args", str(sockets.arguments_read), "--", *self._command(spec, channel_fd)
        ]  # fmt: skip
        inherited = [fd for fd in (*vars(fds).values(), sockets.arguments_read) if fd is not None]
        return command, "\0".join(arguments).encode(), inherited

    def _command(self, spec: SandboxSpec, channel_fd: int) -> list[str]:
        layers = [f"{LAYERS_INSIDE}/{index}" for index in range(len(spec.layers))]
        config = {
            "fd": channel_fd,
            "path": [*layers, *self.interpreter.site_inside],
            "preload": list(spec.preload),
        }
        python = [
            str(self.interpreter.executable_inside),
            "-I",
            "-S",
            "-u",
            PROGRAM_INSIDE,
            encode_config(config),
        ]
        return [*become(self.tools.setpriv, spec.uid), *python] if self.root_mode else python

    async def _complete(
        self,
        spec: SandboxSpec,
        launched: Launched,
        sockets: StartSockets,
        group: Group | None,
        arguments: bytes,
    ) -> ProcessSandbox:
        if group:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its output is reported below
                group.attach(launched.process.pid)
        # It waits for its arguments and has started nothing yet: all that it starts is in the group, so a
        # service that is killed at any point from here on leaves no process outside of it.
        sockets.send_arguments(arguments)
        child = await self._child_pid(launched, sockets)
        try:
            pidfd = os.pidfd_open(child)
        except ProcessLookupError as exc:  # it has ended
            raise SandboxUnavailableError(explain_start_failure(await launched.words())) from exc
        try:
            try:
                await expect_hello(launched.reader)
            except SandboxUnavailableError as exc:
                raise SandboxUnavailableError(
                    f"{exc}; {explain_start_failure(await launched.words())}"
                ) from exc
            verify_isolation(
                child, uid=spec.uid if self.root_mode else os.geteuid(), parent=launched.process.pid
            )
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            raise
        return ProcessSandbox(
            process=launched.process,
            reader=launched.reader,
            writer=launched.writer,
            output=launched.output,
            pidfd=pidfd,
            first_pid=child,
            spec=spec,
            group=group,
        )

    async def _child_pid(self, launched: Launched, sockets: StartSockets) -> int:
        try:
            async with asyncio.timeout(PROGRAM_SECONDS):
                text = await sockets.read_info()
            return int(json.loads(text)["child-pid"])
        except (ValueError, KeyError, TimeoutError) as exc:
            raise SandboxUnavailableError(explain_start_failure(await launched.words())) from exc


class StartSockets:
    """The socket with bubblewrap's arguments, and the one on which it names the first process.

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


def verify_isolation(pid: int, *, uid: int, parent: int) -> None:
    """Read back from the kernel that a process is confined as intended.

    Args:
        parent: process that must have started it; another one means that the id was reused.

    Raises:
        SandboxUnavailableError: it is another process, runs as another user or as root, keeps a
            capability, may gain privileges, or has no seccomp filter.
    """
    status = proc_files.read(f"/proc/{pid}/status")
    problems = []
    if int(proc_files.field_of(status, b"PPid")) != parent:
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
    if problems:
        raise SandboxUnavailableError(f"the sandbox is not isolated: {', '.join(problems)}; no code was run")


def become(setpriv: str, uid: int) -> list[str]:
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


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
