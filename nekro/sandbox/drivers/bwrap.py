"""Isolation by bubblewrap, the default driver.

The user of this service selects one of two modes. As an ordinary user: a user namespace, and the
code's host user is the service's own. As root: no user namespace, and ``setpriv`` changes to a user
of the pool before the interpreter starts, because host root inside a user namespace is still host
root to files and kernel settings outside. Before a sandbox counts as started, its host user,
capabilities and seccomp mode are read back from the kernel.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from functools import cached_property, partial
from pathlib import Path

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Enforcement, IsolationCheck, SandboxSpec, check_of
from nekro.sandbox.drivers.bwrap_args import LAYERS_INSIDE, BwrapFds, bwrap_arguments
from nekro.sandbox.drivers.fork_server import ForkServer, ForkServers
from nekro.sandbox.drivers.isolated import (
    IsolatedStart,
    Tools,
    explain_start_failure,
    find_tools,
    isolated_start,
    memory_file,
    verify_isolation,
)
from nekro.sandbox.drivers.process import ProcessSandbox, expect_hello, launch
from nekro.sandbox.filter.seccomp import build_filter, filter_fd
from nekro.sandbox.interpreter import (
    OPTIONS,
    PROGRAM_INSIDE,
    Access,
    Interpreter,
    encode_config,
    find_interpreter,
    guest_program,
)
from nekro.sandbox.limits.cgroups import Cgroups, find_cgroups
from nekro.sandbox.limits.enforcement import group_limits
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["BwrapDriver"]


class BwrapDriver:
    """Starts sandboxes with bubblewrap."""

    name = "bwrap"

    hash_seed = 0

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
    def _cgroups(self) -> tuple[Cgroups | None, IsolationCheck]:
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

    async def examine(self) -> tuple[IsolationCheck, ...]:
        """Check the programs, the interpreter and the kernel's features."""
        return await asyncio.to_thread(self._examine)

    def _examine(self) -> tuple[IsolationCheck, ...]:
        mode = "root mode: code runs as a host user of the pool" if self.root_mode else "user mode"
        return (
            check_of("bubblewrap", lambda: f"{self.tools.bwrap} {self.tools.version}, {mode}"),
            check_of("interpreter", lambda: self.interpreter.description),
            check_of("seccomp", lambda: f"{len(self._filter) // 8} instructions for {platform.machine()}"),
            self._cgroups[1],
            IsolationCheck(name="network", ok=True, detail="own namespace, and no sockets but AF_UNIX ones"),
        )

    async def limits(self) -> tuple[Enforcement, ...]:
        """Return which limits the control groups enforce."""
        return group_limits((await asyncio.to_thread(lambda: self._cgroups))[0])

    async def start(self, spec: SandboxSpec) -> ProcessSandbox:
        """Start a sandbox and return it when it is ready for code.

        Raises:
            SandboxUnavailableError: it cannot be started, or it is not isolated as intended.
        """
        if self.forks is not None:
            forked = await self._forked(self.forks.of(spec), spec)
            if forked is not None:
                return forked
        async with isolated_start(self._cgroups[0]) as start:
            ours, theirs = socket.socketpair()
            start.on_failure.callback(ours.close)
            start.descriptors.callback(theirs.close)
            fds = self._descriptors(spec, start)
            arguments = bwrap_arguments(
                spec,
                settings=self._settings,
                interpreter=self.interpreter,
                fds=fds,
                root_mode=self.root_mode,
                zero_device=start.group is not None,
                hash_seed=self.hash_seed,
            )
            launched = await start.run(
                partial(launch, channel=theirs, ours=ours),
                self.tools,
                arguments,
                self._command(spec, theirs.fileno()),
                fds=[fd for fd in vars(fds).values() if fd is not None],
                uid=spec.uid if self.root_mode else None,
            )
            try:
                await expect_hello(launched.reader)
            except SandboxUnavailableError as exc:
                raise SandboxUnavailableError(
                    f"{exc}; {explain_start_failure(await launched.words())}"
                ) from exc
            uid = spec.uid if self.root_mode else os.geteuid()
            verify_isolation(start.first_pid, uid=uid, parent=launched.process.pid)
            return ProcessSandbox(
                process=launched.process,
                reader=launched.reader,
                writer=launched.writer,
                output=launched.output,
                pidfd=start.pidfd,
                first_pid=start.first_pid,
                spec=spec,
                group=start.group,
            )

    async def _forked(self, forks: ForkServer, spec: SandboxSpec) -> ProcessSandbox | None:
        """Return a sandbox of the fork server; None where it cannot make this one now."""
        if not (spec.may_fork and forks.is_ready(forks.kind_of(spec))):
            return None
        try:
            async with isolated_start(self._cgroups[0]) as start:
                return await forks.fork(spec, start.group)
        except SandboxUnavailableError as exc:
            logger.bind(error=str(exc)).warning("sandbox_fork_failed")
            return None

    async def close(self) -> None:
        """End the fork servers."""
        if self.forks is not None:
            await self.forks.close()

    @cached_property
    def forks(self) -> ForkServers | None:
        """The fork servers; None where the settings turn them off."""
        if not self._settings.fork_server:
            return None
        return ForkServers(
            lambda packages: ForkServer(
                self._settings,
                packages=packages,
                tools=self.tools,
                interpreter=self.interpreter,
                filter_program=self._filter,
                zero_device=self._cgroups[0] is not None,
                root_mode=self.root_mode,
                hash_seed=self.hash_seed,
            )
        )

    def _descriptors(self, spec: SandboxSpec, start: IsolatedStart) -> BwrapFds:
        by_fd = self.tools.binds_descriptors
        return BwrapFds(
            seccomp=start.hold(filter_fd(self._loopback_filter if spec.loopback else self._filter)),
            runner=start.hold(memory_file("runner", self._runner)),
            shared=start.hold(_open_directory(spec.shared_dir)) if by_fd else None,
            uploads=start.hold(_open_directory(spec.uploads_dir)) if by_fd else None,
        )

    def _command(self, spec: SandboxSpec, channel_fd: int) -> list[str]:
        layers = [f"{LAYERS_INSIDE}/{index}" for index in range(len(spec.layers))]
        config = {
            "fd": channel_fd,
            "path": [*layers, *self.interpreter.site_inside],
            "preload": list(spec.preload),
        }
        python = str(self.interpreter.executable_inside)
        return [python, *OPTIONS, "-S", "-u", PROGRAM_INSIDE, encode_config(config)]


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
