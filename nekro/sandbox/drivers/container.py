"""Isolation by a container engine (docker or podman, optionally with runsc), for production.

The driver uses the engine's command line, not its API: it is the same for both engines and needs no
dependency. A socket cannot be inherited through an engine, so the container gets one directory with one
socket, which accepts one connection and is then removed. Inside, the runner loads the seccomp filter of
``nekro.sandbox.filter.seccomp`` in addition to the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from broker_config.settings import SandboxSettings
from nekro.base.tasks import clean_up_timeout
from nekro.sandbox.driver import Enforcement, Enforcer, ExitStatus, IsolationCheck, SandboxSpec, Usage
from nekro.sandbox.drivers.bwrap_args import LAYERS_INSIDE
from nekro.sandbox.drivers.process import expect_hello
from nekro.sandbox.filter.seccomp import build_filter
from nekro.sandbox.interpreter import OPTIONS, PROGRAM_INSIDE, encode_config, guest_program
from nekro.sandbox.leftovers import ServiceId, make_home, own_id, remove_home
from nekro.sandbox.limits.enforcement import MAX_OPEN_FILES
from nekro.sandbox.models import Limit
from nekro_agent.durations import PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "ContainerDriver",
    "ContainerSandbox",
    "GuestListener",
]

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class GuestListener:
    """A listening socket that accepts one connection, of one user."""

    def __init__(self, path: Path, *, uid: int) -> None:
        self._path = path
        self._uid = uid

    async def open(self) -> None:
        self._connection: asyncio.Future[_Streams] = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        # Only the code's user may enter the directory around it.
        self._path.chmod(0o666)

    async def first_connection(self, ended: asyncio.Future[int]) -> _Streams:
        """Return the first connection.

        Raises:
            SandboxUnavailableError: the container ended first, or did not connect within 30 s.
        """
        waiting: set[asyncio.Future[object]] = {self._connection, ended}  # type: ignore[arg-type]
        await asyncio.wait(waiting, timeout=PROGRAM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._connection.done():
            return self._connection.result()
        reason = "ended" if ended.done() else f"did not connect within {PROGRAM_SECONDS:g} s"
        raise SandboxUnavailableError(f"the container {reason} while it started")

    async def close(self) -> None:
        """Accept no more connections and remove the socket."""
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if self._connection.done() or struct.unpack("3i", credentials)[1] != self._uid:
            writer.close()
            return
        self._connection.set_result((reader, writer))


_SOCKET_INSIDE: Final = "/run/nekro"
_LABEL: Final = "nekro.service"
#: File written by podman's monitor when memory ran out; podman 4.3 searches it elsewhere and reports no OOM.
_PODMAN_NOTE: Final = "oom"
#: Exit code of the client when the engine itself failed, not the container.
_ENGINE_FAILED: Final = 125


class ContainerDriver:
    """Starts sandboxes as containers."""

    name = "container"

    hash_seed = 0

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings

    @cached_property
    def engine(self) -> str:
        """The engine's command.

        Raises:
            SandboxUnavailableError: there is none.
        """
        for name in ("docker", "podman"):
            if found := shutil.which(name):
                return found
        raise SandboxUnavailableError("no container engine (docker or podman) on PATH; install one")

    async def examine(self) -> tuple[IsolationCheck, ...]:
        """Check the engine, its server and the image; remove containers of services that have ended."""
        try:
            engine = self.engine
        except SandboxUnavailableError as exc:
            return (IsolationCheck(name="container engine", ok=False, detail=str(exc)),)
        # Both engines answer this the same way; their `info` and their formats of `ps` differ.
        code, words = await _ask(engine, "ps", "--quiet")
        if code:
            fix = "start the engine, or let this user talk to it (group docker, or rootless podman)"
            return (IsolationCheck(name="container engine", ok=False, detail=words, fix=fix),)
        await self._remove_abandoned()
        image = self._settings.container_image
        code, words = await _ask(engine, "image", "inspect", "--format", "{{.Id}}", image)
        return (
            IsolationCheck(name="container engine", ok=True, detail=engine),
            IsolationCheck(
                name="container image",
                ok=code == 0,
                detail=f"{image} {words[:19]}" if code == 0 else f"{image} is not on this machine",
                fix="" if code == 0 else f"{Path(engine).name} pull {image}",
            ),
        )

    async def limits(self) -> tuple[Enforcement, ...]:
        """Ask the engine which of its limits this kernel enforces."""
        _, words = await _ask(self.engine, "info", "--format", "{{json .}}")
        kept = _kept_by_engine(words)
        return tuple(
            Enforcement(limit=limit, by=Enforcer.KERNEL, detail="set by the engine")
            if limit in kept
            else Enforcement(
                limit=limit,
                by=Enforcer.NOTHING,
                detail="the engine does not report that it enforces it",
                fix="give the engine control groups with memory, swap, pids and cpu",
            )
            for limit in ("memory", "swap", "pids", "cpu")
        )

    async def start(self, spec: SandboxSpec) -> ContainerSandbox:
        """Start a container and return it when it is ready for code.

        Raises:
            SandboxUnavailableError: the engine refused, or the container did not send HELLO.
        """
        home = make_home()
        name = f"nekro-{secrets.token_hex(8)}"
        try:
            return await self._start(spec, home, name)
        except BaseException:
            await _ask(self.engine, "rm", "--force", name)
            remove_home(home)
            raise

    async def close(self) -> None:
        """Nothing outlives single sandboxes."""

    async def _start(self, spec: SandboxSpec, home: Path, name: str) -> ContainerSandbox:
        uid = _user(spec)
        _furnish(home, uid)
        listener = GuestListener(home / "sock" / "bridge.sock", uid=uid)
        await listener.open()
        process = await asyncio.create_subprocess_exec(
            self.engine,
            *self._arguments(spec, home, name, uid),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Podman's monitor writes its out-of-memory file into its working directory.
            cwd=home,
        )
        if process.stdout is None:  # never, with PIPE; for the type checker
            raise SandboxUnavailableError("the engine has no output")
        ended = asyncio.ensure_future(process.wait())
        try:
            reader, writer = await listener.first_connection(ended)
            await expect_hello(reader)
        except SandboxUnavailableError as exc:
            process_ended = ended.done()
            words = (await process.stdout.read(2048)).decode("utf-8", "replace") if process_ended else ""
            raise SandboxUnavailableError(f"{exc}: {' '.join(words.split())}") from exc
        finally:
            await listener.close()
            ended.cancel()
        return ContainerSandbox(
            engine=self.engine,
            name=name,
            process=process,
            reader=reader,
            writer=writer,
            output=process.stdout,
            spec=spec,
            home=home,
            on_close=[lambda: remove_home(home)],
        )

    def _arguments(self, spec: SandboxSpec, home: Path, name: str, uid: int) -> list[str]:
        settings = self._settings
        memory = str(settings.memory_bytes)
        families = (socket.AF_UNIX, socket.AF_INET) if spec.loopback else (socket.AF_UNIX,)
        layers = [f"{LAYERS_INSIDE}/{index}" for index in range(len(spec.layers))]
        config = {
            "socket": f"{_SOCKET_INSIDE}/bridge.sock",
            "seccomp": build_filter(strict_memory=False, families=families),
            "path": layers,
            "preload": list(spec.preload),
        }
        environment = {
            "HOME": "/tmp",  # noqa: S108 - a path inside
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": str(self.hash_seed),
        }
        return [
            "run", "--name", name, "--label", f"{_LABEL}={own_id()}", "--pull", "never",
            *(("--runtime", settings.container_runtime) if settings.container_runtime else ()),
            "--network", "none", "--ipc", "private", "--hostname", "sandbox",
            "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--user", f"{uid}:{uid}",
            "--memory", memory, "--memory-swap", memory, "--cpus", "1",
            "--pids-limit", str(settings.max_processes),
            "--ulimit", f"fsize={settings.max_file_bytes}", "--ulimit", "core=1",
            "--ulimit", f"nofile={MAX_OPEN_FILES}", *_processes_of_user(settings),
            "--tmpfs", f"/tmp:rw,nosuid,nodev,mode=1777,size={settings.tmp_bytes}",  # noqa: S108 - inside
            "--shm-size", str(settings.tmp_bytes),
            "--volume", f"{spec.shared_dir}:/app/shared:rw",
            "--volume", f"{spec.uploads_dir}:/app/uploads:ro",
            "--volume", f"{home / 'runner.py'}:{PROGRAM_INSIDE}:ro",
            "--volume", f"{home / 'sock'}:{_SOCKET_INSIDE}:ro",
            *(word for at, path in zip(layers, spec.layers, strict=True)
              for word in ("--volume", f"{path}:{at}:ro")),
            *(word for item in environment.items() for word in ("--env", "=".join(item))),
            "--workdir", "/app", "--entrypoint", "python3",
            settings.container_image, *OPTIONS, "-u", PROGRAM_INSIDE, encode_config(config),
        ]  # fmt: skip

    async def _remove_abandoned(self) -> None:
        """Remove the containers of services that have certainly ended."""
        code, words = await _ask(self.engine, "ps", "--all", "--quiet", "--filter", f"label={_LABEL}")
        if code or not words:
            return
        form = f'{{{{.Id}}}} {{{{.State.Status}}}} {{{{index .Config.Labels "{_LABEL}"}}}}'
        # Fails when a container is removed meanwhile, but still prints the other containers.
        _, words = await _ask(self.engine, "container", "inspect", "--format", form, *words.split())
        for line in words.split("\n"):
            container, _, rest = line.partition(" ")
            state, _, label = rest.partition(" ")
            owner = ServiceId.parse(label)
            if owner is not None and owner.is_gone(still_runs=state == "running"):
                await _ask(self.engine, "rm", "--force", container)


@dataclass(kw_only=True)
class ContainerSandbox:
    """A started container that waits for its code."""

    engine: str
    name: str
    #: The engine's client in the foreground; its exit code is that of the container.
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: asyncio.StreamReader
    spec: SandboxSpec
    #: Working directory of the engine's client.
    home: Path
    on_close: list[Callable[[], object]]
    scratch_dir: Path | None = None
    shares_user: bool = False
    is_forked: bool = False
    _killing: asyncio.Task[tuple[int, str]] | None = None
    _exit: ExitStatus | None = None
    _closed: bool = field(default=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    @property
    def memory_bounded(self) -> bool:
        """True: the engine bounds it."""
        return True

    @property
    def alive(self) -> bool:
        """Whether the container runs."""
        return self.process.returncode is None

    async def drain(self) -> None:
        """Wait for the container's end: until then the engine may still pass on output."""
        await self.process.wait()

    async def wait(self) -> ExitStatus:
        """Wait until the container has ended, and ask the engine whether memory ran out."""
        code = await self.process.wait()
        if self._exit is None:
            _, words = await _ask(self.engine, "inspect", "--format", "{{.State.OOMKilled}}", self.name)
            limit = Limit.MEMORY if words == "true" or (self.home / _PODMAN_NOTE).exists() else None
            self._exit = ExitStatus(code=code if code >= 0 else 128 - code, limit=limit)
        return self._exit

    def kill(self) -> None:
        """Ask the engine to kill the container; no effect when it has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the sandbox was before it
            self._loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        if self.alive and not self._closed and self._killing is None:
            self._killing = asyncio.ensure_future(_ask(self.engine, "kill", self.name))

    def usage(self) -> Usage:
        """Return unknown values: asking the engine takes too long."""
        return Usage()

    def processes(self) -> list[int]:
        """Return an empty list: the engine manages the processes."""
        return []

    async def close(self) -> None:
        """Remove the container and its socket directory."""
        if self._closed:
            return
        self._kill()
        self._closed = True
        if self._killing is not None:
            await self._killing
        await _ask(self.engine, "rm", "--force", self.name)
        with contextlib.suppress(TimeoutError):
            async with clean_up_timeout(PROGRAM_SECONDS):
                await self.process.wait()
        self.writer.close()
        for action in self.on_close:
            action()


def _user(spec: SandboxSpec) -> int:
    """Return the user id of the code: from the pool when this service is root, else the service's own."""
    return spec.uid if os.geteuid() == 0 else os.geteuid()


def _processes_of_user(settings: SandboxSettings) -> tuple[str, ...]:
    # Only where the container has a user of its own: the kernel counts all processes of a user together.
    # Set explicitly, as podman's default is not permitted for every root.
    return ("--ulimit", f"nproc={settings.max_processes}") if os.geteuid() == 0 else ()


def _kept_by_engine(info: str) -> set[str]:
    """Return the limits that an engine enforces, read from the ``info`` of docker or podman."""
    try:
        found: Any = json.loads(info)
        if "host" not in found:
            flags = {"memory": "MemoryLimit", "swap": "SwapLimit", "pids": "PidsLimit", "cpu": "CpuCfsQuota"}
            return {limit for limit, flag in flags.items() if found.get(flag) is True}
        controllers = set(found["host"]["cgroupControllers"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
    # Podman sets the swap limit with that of memory.
    return (controllers & {"memory", "pids", "cpu"}) | ({"swap"} if "memory" in controllers else set())


def _furnish(home: Path, uid: int) -> None:
    home.chmod(0o711)
    # As source: the Python of the image may be of any version.
    (home / "runner.py").write_bytes(guest_program(None))
    (home / "runner.py").chmod(0o444)
    (home / "sock").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(home / "sock", uid, uid)


async def _ask(engine: str, *arguments: str) -> tuple[int, str]:
    """Run one engine command; returns its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        engine,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with clean_up_timeout(PROGRAM_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return (
            _ENGINE_FAILED,
            f"{Path(engine).name} {arguments[0]} did not answer within {PROGRAM_SECONDS:g} s",
        )
    return process.returncode or 0, output.decode("utf-8", "replace").strip()
