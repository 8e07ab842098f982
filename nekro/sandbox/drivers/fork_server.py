"""The host's end of a fork server: start it, ask it for runs, and follow the processes that it forked.

``nekro.sandbox.guest.fork_server`` describes the processes. The host trusts the fork server, which runs no
code of a model, and reads back from the kernel all the same how each run's processes are confined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import SandboxSpec
from nekro.sandbox.drivers.bwrap_args import LAYERS_INSIDE, hidden_entries, server_arguments
from nekro.sandbox.drivers.fork_link import ForkLink, Kind, launch_server
from nekro.sandbox.drivers.forked import ids_of, verify_namespaces
from nekro.sandbox.drivers.isolated import Tools, isolated_start, memory_file, verify_isolation
from nekro.sandbox.drivers.process import ProcessSandbox, expect_hello
from nekro.sandbox.filter.calls import FORK_SERVER
from nekro.sandbox.filter.seccomp import build_filter, waiting_filter
from nekro.sandbox.guest.namespaces import clone_mount
from nekro.sandbox.interpreter import OPTIONS, PROGRAM_INSIDE, Interpreter, guest_program
from nekro.sandbox.limits.cgroups import Group
from nekro.sandbox.streams import OutputPipe
from nekro.sandbox.users import UserHold, hold_user, pool_range
from nekro_agent.durations import FRESH_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["PACKAGES", "ForkServer", "ForkServers", "imports_packages"]

#: Packages of the base layer that programs import most.
PACKAGES: Final = ("numpy", "pandas", "matplotlib.pyplot", "PIL.Image")
_ROOTS: Final = tuple(name.partition(".")[0] for name in PACKAGES)
_IMPORTED: Final = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
#: A template is replaced after so many forks, so that runs do not share one address layout for long.
_MOST_FORKS: Final = 1000
#: Starts that fail one after the other double the pause this many times, to an hour.
_MOST_DOUBLINGS: Final = 7
_KEY: Final = "fork-server"
#: Filters of each process: that of the fork server, and its own.
_FILTERS: Final = 2
#: The user that the kernel shows inside, of a service that is an ordinary user.
_USER_INSIDE: Final = 65534


def imports_packages(texts: Iterable[str]) -> bool:
    """Whether code seems to import one of ``PACKAGES``, or what may do so.

    Args:
        texts: the code, and its variables.
    """
    return any(
        any(name in text for name in _ROOTS)
        or any(name not in sys.stdlib_module_names for name in _IMPORTED.findall(text))
        for text in texts
    )


class ForkServers:
    """A driver's fork servers: one whose template has imported packages, and one of a small template.

    A fork copies the page tables of its template, and loads the pages that it touches. A program that imports
    no package pays for those of the interpreter only; one that does so unexpectedly imports it itself.
    """

    def __init__(self, make: Callable[[tuple[str, ...]], ForkServer]) -> None:
        self._loaded, self._bare = make(PACKAGES), make(())

    def __iter__(self) -> Iterator[ForkServer]:
        yield from (self._loaded, self._bare)

    def of(self, spec: SandboxSpec) -> ForkServer:
        """Return the one that forks this run."""
        return self._loaded if spec.imports_packages else self._bare

    async def close(self) -> None:
        """End both; they can be started again."""
        for server in self:
            await server.close()


class ForkServer:
    """Starts a fork server when it is needed, replaces it, and forks runs."""

    def __init__(
        self,
        settings: SandboxSettings,
        *,
        packages: tuple[str, ...],
        tools: Tools,
        interpreter: Interpreter,
        filter_program: bytes,
        zero_device: bool,
        root_mode: bool,
        hash_seed: int,
    ) -> None:
        self._hash_seed = hash_seed
        self._settings = settings
        self._packages = packages
        self._tools = tools
        self._interpreter = interpreter
        self._filter = filter_program
        self._zero_device = zero_device
        self._root_mode = root_mode
        self._server: ForkLink | None = None
        self._starting: asyncio.Task[None] | None = None
        #: Why it did not start; "" when it did.
        self.reason = ""
        self._retry_at = 0.0
        self._failures = 0
        #: Servers that were replaced and end with their last runs.
        self._old: set[ForkLink] = set()
        #: Runs that found no server.
        self._asked = 0

    def kind_of(self, spec: SandboxSpec) -> Kind:
        """Return the kind of fork server that could fork this run."""
        areas = () if self._root_mode else (spec.shared_dir.parent, spec.uploads_dir.parent)
        return Kind(layers=spec.layers, preload=spec.preload, packages=self._packages, areas=areas)

    @property
    def is_starting(self) -> bool:
        """Whether a server starts in the background."""
        return self._starting is not None

    def is_ready(self, kind: Kind) -> bool:
        """Whether a run of this kind can be forked now.

        If not, and it is not the first run of this process, a server of this kind starts in the background:
        a command that runs one program would only wait for the processors.
        """
        server = self._server
        if server is not None and server.is_usable and server.kind == kind:
            return server.takes_runs
        self._asked += 1
        if self._asked > 1:
            self._begin(kind)
        return False

    async def ready(self, kind: Kind) -> bool:
        """Start a server of this kind if there is none, and wait; returns whether it takes runs."""
        if not self.is_ready(kind):
            self._begin(kind)
            if self._starting is not None:
                await asyncio.wait([self._starting])
        return self.is_ready(kind)

    def _begin(self, kind: Kind) -> None:
        if self._starting is None and time.monotonic() >= self._retry_at:
            self._starting = asyncio.create_task(self._replace(kind), name="sandbox-fork-server")

    async def _replace(self, kind: Kind) -> None:
        try:
            old, self._server = self._server, None
            if old is not None:
                old.retire()
                self._old = {ended for ended in (*self._old, old) if not ended.is_closed}
            self._server = await self._start(kind)
            self.reason, self._failures = "", 0
        except (SandboxUnavailableError, OSError) as exc:  # runs start without it
            self.reason = str(exc)
            # Rarer and rarer: most often the host denies user namespaces, and will go on to do so.
            self._failures += 1
            self._retry_at = time.monotonic() + PROGRAM_SECONDS * 2 ** min(self._failures, _MOST_DOUBLINGS)
            logger.bind(error=str(exc)).warning("sandbox_fork_server_failed")
        finally:
            self._starting = None

    async def _start(self, kind: Kind) -> ForkLink:
        hold = hold_user(_KEY, settings=self._settings)
        try:
            async with isolated_start(None) as start:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.setblocking(True)
                start.on_failure.callback(ours.close)
                start.descriptors.callback(theirs.close)
                program = start.hold(
                    memory_file("server", guest_program(self._interpreter.version, forks=True))
                )
                nothing = start.hold(memory_file("nothing", b""))
                arguments = server_arguments(
                    settings=self._settings,
                    interpreter=self._interpreter,
                    layers=kind.layers,
                    areas=kind.areas,
                    program_fd=program,
                    nothing_fd=nothing,
                    root_mode=self._root_mode,
                    zero_device=self._zero_device,
                    hash_seed=self._hash_seed,
                )
                python = str(self._interpreter.executable_inside)
                ours.send(json.dumps(self._config(kind, hold)).encode())
                launched = await start.run(
                    partial(launch_server, control=theirs),
                    self._tools,
                    arguments,
                    [python, *OPTIONS, "-S", "-u", PROGRAM_INSIDE, str(theirs.fileno())],
                    fds=[program, nothing],
                    uid=None,
                )
                server = ForkLink(
                    kind=kind,
                    launched=launched,
                    pidfd=start.pidfd,
                    control=ours,
                    hold=hold,
                )
                server.listen()
                start.on_failure.callback(server.lose)
                try:
                    async with asyncio.timeout(PROGRAM_SECONDS):
                        await server.ready.wait()
                except TimeoutError as exc:
                    raise SandboxUnavailableError("the fork server did not start in time") from exc
                if server.is_lost:
                    raise SandboxUnavailableError(
                        f"no fork server: {(await launched.words()).strip()[-500:]}"
                    )
            server.log_output()
            return server
        except BaseException:
            hold.release()
            raise

    def _config(self, kind: Kind, hold: UserHold) -> dict[str, Any]:
        files, directories = hidden_entries()
        layers = [f"{LAYERS_INSIDE}/{index}" for index in range(len(kind.layers))]
        template = {
            "hidden_files": files,
            "hidden_directories": directories,
            "tmp_bytes": self._settings.tmp_bytes,
            "path": [*layers, *self._interpreter.site_inside],
            "preload": kind.preload,
            "packages": kind.packages,
            "seccomp": self._filter.hex(),
        }
        return {
            "users": (*pool_range(self._settings), hold.uid) if self._root_mode else None,
            "seccomp": build_filter(strict_memory=False, also=FORK_SERVER).hex(),
            "waiting_seccomp": waiting_filter().hex(),
            "most_forks": _MOST_FORKS,
            "template": json.dumps(template),
        }

    async def fork(self, spec: SandboxSpec, group: Group | None) -> ProcessSandbox:
        """Fork the process of a run and return its sandbox; the group is the caller's until then.

        Raises:
            SandboxUnavailableError: it cannot be forked, or it is not isolated as intended.
        """
        server = self._server
        if server is None:
            raise SandboxUnavailableError("there is no fork server")
        async with contextlib.AsyncExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            output_fd, printed_fd = os.pipe()
            with contextlib.ExitStack() as passed:
                passed.callback(theirs.close)
                passed.callback(os.close, printed_fd)
                output = await OutputPipe.open(output_fd)
                undo.callback(output.close)
                theirs.setblocking(True)
                mounts = self._mounts(spec, passed)
                groups = [] if group is None else group.entries()
                for fd in groups:
                    passed.callback(os.close, fd)
                request = {
                    "uid": spec.uid if self._root_mode else _USER_INSIDE,
                    "mounts": len(mounts),
                    "shared": spec.shared_dir.name,
                    "uploads": spec.uploads_dir.name,
                }
                ours.send(json.dumps(request).encode())
                process = await server.request([theirs.fileno(), printed_fd, *mounts, *groups])
            undo.push_async_callback(process.wait)
            undo.callback(process.kill)
            pidfd = os.dup(process.first)
            undo.callback(os.close, pidfd)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            undo.callback(writer.close)
            try:
                await expect_hello(reader)
            except SandboxUnavailableError as exc:
                words = b""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FRESH_SECONDS):
                        words = await output.read(4096)
                raise SandboxUnavailableError(f"{exc}: {words.decode('utf-8', 'replace').strip()}") from exc
            uid = spec.uid if self._root_mode else os.geteuid()
            verify_isolation(process.run_pid, uid=uid, parent=None, filters=_FILTERS)
            verify_isolation(process.pid, uid=server.hold.uid, parent=None, filters=_FILTERS)
            verify_namespaces(process, ids_of(server.template)[0])
            undo.pop_all()
        return ProcessSandbox(
            process=process,
            reader=reader,
            writer=writer,
            output=output,
            pidfd=pidfd,
            first_pid=process.pid,
            spec=spec,
            group=group,
            is_forked=True,
        )

    def _mounts(self, spec: SandboxSpec, passed: contextlib.ExitStack) -> list[int]:
        """Return mounts of the chat's directories; an ordinary user cannot make them outside."""
        mounts: list[int] = []
        if self._root_mode:
            for path, writable in ((spec.shared_dir, True), (spec.uploads_dir, False)):
                mounts.append(clone_mount(str(path), writable=writable))
                passed.callback(os.close, mounts[-1])
        return mounts

    async def close(self) -> None:
        """End the fork server; it can be started again."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        server, self._server = self._server, None
        for ended in (*self._old, *(() if server is None else (server,))):
            await ended.close()
        self._old.clear()
