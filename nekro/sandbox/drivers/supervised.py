"""The two drivers without bubblewrap, which isolate less.

``landlock`` restricts files, network and resources, but shares the host's process table and
paths: ``/app`` does not exist, ``./shared`` and ``./uploads`` do. ``unsafe`` isolates nothing; it
is for debugging and requires two switches. Neither is ever selected automatically.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import sys
from functools import cached_property
from pathlib import Path
from typing import Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Enforcement, IsolationCheck, SandboxSpec, check_of
from nekro.sandbox.drivers.bwrap_args import runner_environment
from nekro.sandbox.drivers.process import LaunchedRunner, ProcessSandbox, expect_hello, launch
from nekro.sandbox.filter.seccomp import build_filter, filter_fd
from nekro.sandbox.guest import confine
from nekro.sandbox.interpreter import (
    OPTIONS,
    Access,
    Interpreter,
    encode_config,
    find_interpreter,
    guest_program,
)
from nekro.sandbox.leftovers import make_home, remove_home
from nekro.sandbox.limits.cgroups import Cgroups, Group, find_cgroups
from nekro.sandbox.limits.enforcement import group_limits
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["UNSAFE_SWITCH", "LandlockDriver", "UnsafeDriver"]

#: The second switch of the unsafe driver: an environment variable that is not set by accident.
UNSAFE_SWITCH: Final = "I_ACCEPT_UNSANDBOXED_CODE"
_DEVICES: Final = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")


class _SupervisedDriver:
    """Starts the runner below a supervisor process."""

    name: str
    confines: bool

    hash_seed = 0

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self.root_mode = os.geteuid() == 0

    @cached_property
    def interpreter(self) -> Interpreter:
        """The Python that runs the code, by its path on the host.

        Raises:
            SandboxUnavailableError: none fits.
        """
        return find_interpreter(
            self._settings.python, access=Access.BY_PATH if self.root_mode else Access.OWN
        )

    @cached_property
    def _cgroups(self) -> tuple[Cgroups | None, IsolationCheck]:
        return find_cgroups(self._settings)

    @cached_property
    def _filter(self) -> bytes:
        # No sockets at all: without a network namespace, a Unix socket by its path is reachable.
        return build_filter(strict_memory=self._cgroups[0] is None, families=(), strict_processes=True)

    async def limits(self) -> tuple[Enforcement, ...]:
        """Return which limits the control groups enforce."""
        return group_limits((await asyncio.to_thread(lambda: self._cgroups))[0])

    async def start(self, spec: SandboxSpec) -> ProcessSandbox:
        """Start the runner and return it when it is ready for code.

        Raises:
            SandboxUnavailableError: it cannot be started or confined.
        """
        if spec.loopback:
            raise SandboxUnavailableError(
                f"the {self.name} driver has no network of its own to build packages in;"
                " use NEKRO_SANDBOX__DRIVER=bwrap"
            )
        cgroups, _ = self._cgroups
        with contextlib.ExitStack() as on_failure:
            home = make_home()
            on_failure.callback(remove_home, home)
            _furnish(home, spec, guest_program(self.interpreter.version))
            group = cgroups.create() if cgroups else None
            if group:
                on_failure.callback(group.remove)
            sandbox = await self._launch(spec, home, group)
            on_failure.pop_all()
        sandbox.on_close.append(lambda: remove_home(home))
        sandbox.scratch_dir = home / "tmp"
        return sandbox

    async def close(self) -> None:
        """Nothing outlives single sandboxes."""

    async def _launch(self, spec: SandboxSpec, home: Path, group: Group | None) -> ProcessSandbox:
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            sandbox = await self._start_between(spec, home, group, ours, theirs)
            on_failure.pop_all()
        return sandbox

    async def _start_between(
        self, spec: SandboxSpec, home: Path, group: Group | None, ours: socket.socket, theirs: socket.socket
    ) -> ProcessSandbox:
        gate_read, gate_write = os.pipe()
        seccomp = filter_fd(self._filter)
        try:
            config = self._config(spec, home, channel=theirs.fileno(), gate=gate_read, seccomp=seccomp)
            command = [str(sys.executable), "-I", "-S", str(Path(confine.__file__)), json.dumps(config)]
            launched = await launch(command, (gate_read, seccomp), channel=theirs, ours=ours)
            return await self._complete(spec, launched, group, gate_write)
        except OSError as exc:
            raise SandboxUnavailableError(f"the {self.name} driver could not start Python: {exc}") from exc
        finally:
            theirs.close()
            for fd in (gate_read, gate_write, seccomp):
                os.close(fd)

    async def _complete(
        self, spec: SandboxSpec, launched: LaunchedRunner, group: Group | None, gate_write: int
    ) -> ProcessSandbox:
        pid = launched.process.pid
        try:
            if group:
                group.attach(pid)
            os.write(gate_write, b"x")
            await expect_hello(launched.reader)
        except SandboxUnavailableError as exc:
            words = " ".join((await launched.words()).split())[:500]
            await launched.abandon()
            raise SandboxUnavailableError(f"{self.name}: {exc}; it printed: {words!r}") from exc
        except BaseException:
            await launched.abandon()
            raise
        return ProcessSandbox(
            process=launched.process,
            reader=launched.reader,
            writer=launched.writer,
            output=launched.output,
            pidfd=os.pidfd_open(pid),
            first_pid=pid,
            spec=spec,
            group=group,
            kill_signal=signal.SIGTERM,
            list_processes=lambda: confine.children_of(pid),
            shares_user=not self.root_mode,
        )

    def _config(
        self, spec: SandboxSpec, home: Path, *, channel: int, gate: int, seccomp: int
    ) -> dict[str, object]:
        runner = {
            "fd": channel,
            "path": [str(path) for path in (*spec.layers, *self.interpreter.site)],
            "preload": list(spec.preload),
        }
        python = str(self.interpreter.executable)
        environment = runner_environment(self.interpreter, hash_seed=self.hash_seed)
        environment |= {
            "HOME": str(home / "tmp"),
            "TMPDIR": str(home / "tmp"),
            "MPLCONFIGDIR": str(home / "tmp" / "matplotlib"),
            "PATH": f"{self.interpreter.executable.parent}:/usr/bin:/bin",
        }
        if self.interpreter.library_path_inside is not None:
            environment["LD_LIBRARY_PATH"] = str(self.interpreter.prefix / "lib")
        readable = [
            *(path for path in _SYSTEM if Path(path).exists()), str(self.interpreter.prefix), str(home),
            str(spec.uploads_dir), *map(str, (*spec.layers, *self.interpreter.site)),
        ]  # fmt: skip
        return {
            "channel": channel,
            "gate": gate,
            "seccomp": seccomp,
            "close": [gate, seccomp],
            "cwd": str(home / "app"),
            "uid": spec.uid if self.root_mode else None,
            "confine": self.confines,
            "readable": [*readable, *_DEVICES],
            "writable": [str(home / "tmp"), str(spec.shared_dir), "/dev/null"],
            "command": [python, *OPTIONS, "-S", "-u", str(home / "runner.py"), encode_config(runner)],
            "environment": environment,
        }


class LandlockDriver(_SupervisedDriver):
    """Isolation of files and network by Landlock and seccomp only: degraded, must be configured."""

    name = "landlock"
    confines = True

    async def examine(self) -> tuple[IsolationCheck, ...]:
        """Check the kernel, the interpreter and the control groups."""
        return await asyncio.to_thread(self._examine)

    def _examine(self) -> tuple[IsolationCheck, ...]:
        version = confine.landlock_version()
        return (
            IsolationCheck(
                name="landlock",
                ok=version >= confine.LEAST_LANDLOCK,
                detail=f"version {version} of the kernel's interface",
                fix="use Linux 6.12 or newer, or NEKRO_SANDBOX__DRIVER=bwrap or container",
            ),
            check_of("interpreter", lambda: self.interpreter.description),
            check_of("seccomp", lambda: f"{len(self._filter) // 8} instructions for {platform.machine()}"),
            IsolationCheck(
                name="processes",
                ok=False,
                detail="no namespaces: code sees the host's paths, /app/shared is ./shared only",
                fix="degraded by choice; install bubblewrap for full isolation",
                needed=False,
            ),
            self._cgroups[1],
        )


class UnsafeDriver(_SupervisedDriver):
    """No isolation at all, for debugging on a disposable machine."""

    name = "unsafe"
    confines = False

    async def examine(self) -> tuple[IsolationCheck, ...]:
        """Check the second switch and the interpreter."""
        accepted = os.environ.get(UNSAFE_SWITCH) == "1"
        return (
            IsolationCheck(
                name="unsafe",
                ok=accepted,
                detail="code of the LLM runs without isolation"
                if accepted
                else "refused: it requires a second switch",
                fix="" if accepted else f"set {UNSAFE_SWITCH}=1 as well, or another NEKRO_SANDBOX__DRIVER",
            ),
            check_of("interpreter", lambda: self.interpreter.description),
        )

    async def start(self, spec: SandboxSpec) -> ProcessSandbox:
        """Start the runner without isolation.

        Raises:
            SandboxUnavailableError: the second switch is not set, or Python cannot be started.
        """
        if os.environ.get(UNSAFE_SWITCH) != "1":
            raise SandboxUnavailableError(f"sandbox.driver=unsafe needs {UNSAFE_SWITCH}=1 as well")
        logger.bind(uid=spec.uid if self.root_mode else os.geteuid()).warning("sandbox_unsafe_run")
        return await super().start(spec)


def _furnish(home: Path, spec: SandboxSpec, program: bytes) -> None:
    """Fill the private directory of one sandbox: runner, working directory, tmp."""
    home.chmod(0o755)
    (home / "runner.py").write_bytes(program)
    (home / "app").mkdir()
    (home / "app" / "shared").symlink_to(spec.shared_dir)
    (home / "app" / "uploads").symlink_to(spec.uploads_dir)
    (home / "tmp").mkdir()
    if os.geteuid() == 0:
        os.chown(home / "tmp", spec.uid, spec.uid)
