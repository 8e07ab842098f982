"""A sandbox that is a process of this host and inherits its socket: launch, handshake, kill, clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from loguru import logger

from nekro.base.tasks import clean_up_timeout
from nekro.sandbox.driver import ExitStatus, SandboxSpec, Usage
from nekro.sandbox.drivers.isolated import Launched
from nekro.sandbox.leftovers import launch_mark
from nekro.sandbox.limits.cgroups import Group
from nekro.sandbox.limits.processes import processes_beside, settled_listing, usage_of
from nekro.sandbox.models import GONE_SECONDS
from nekro.sandbox.streams import PROTOCOL, FrameKind, FrameReader, OutputPipe
from nekro_agent.durations import CLOSE_STEP_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import SandboxProtocolError, SandboxUnavailableError

__all__ = ["LaunchedRunner", "ProcessSandbox", "StartedProcess", "expect_hello", "launch", "start_printing"]

_HELLO_BYTES: Final = 1 << 10


@dataclass(kw_only=True)
class LaunchedRunner(Launched):
    """A started process that has not sent HELLO yet."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: OutputPipe

    async def words(self) -> str:
        """Return what it printed, for the message of a failed start."""
        with contextlib.suppress(TimeoutError):
            async with clean_up_timeout(CLOSE_STEP_SECONDS):
                return (await self.output.read(4096)).decode("utf-8", "replace")
        return ""

    async def abandon(self) -> None:
        """Kill and reap it, end the processes of this launch, and close its streams."""
        await super().abandon()
        self.writer.close()
        self.output.close()


async def launch(
    command: Sequence[str], fds: Sequence[int], *, channel: socket.socket, ours: socket.socket
) -> LaunchedRunner:
    """Start ``command``, which inherits ``channel`` and ``fds``; ``ours`` is the bridge's end of the socket.

    Must be called on a thread that lives as long as the sandbox: the kernel sends the parent-death
    signal, which ends sandboxes of a killed service, when the *thread* ends.
    """
    # The guest needs a blocking socket. Kombu sets a default timeout for all new sockets of the process
    # while it closes a connection, and a socket with a timeout is non-blocking in the guest.
    channel.setblocking(True)
    process, output, mark = await start_printing(command, [channel.fileno(), *fds])
    channel.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    return LaunchedRunner(process=process, reader=reader, writer=writer, output=output, mark=mark)


async def start_printing(
    command: Sequence[str], fds: Sequence[int]
) -> tuple[asyncio.subprocess.Process, OutputPipe, dict[str, str]]:
    """Start a process that inherits ``fds``; returns it, what it prints, and the mark of this launch."""
    mark = launch_mark()
    # An OutputPipe, because the event loop's own pipe does not report whether it is empty.
    output_fd, printed_fd = os.pipe()
    with contextlib.ExitStack() as on_failure:
        try:
            output = await OutputPipe.open(output_fd)
            on_failure.callback(output.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed_fd,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=fds,
                env=mark,
                cwd="/",
            )
        finally:
            os.close(printed_fd)
        on_failure.pop_all()
    return process, output, mark


async def expect_hello(reader: asyncio.StreamReader) -> None:
    """Wait for a well-formed HELLO.

    Raises:
        SandboxUnavailableError: another frame arrived, or none in time.
    """
    frames = FrameReader(reader, limits={FrameKind.HELLO: _HELLO_BYTES})
    try:
        async with asyncio.timeout(PROGRAM_SECONDS):
            frame = await frames.read()
    except TimeoutError as exc:
        raise SandboxUnavailableError(f"the sandbox did not start within {PROGRAM_SECONDS:g} s") from exc
    except SandboxProtocolError as exc:
        raise SandboxUnavailableError(f"the sandbox did not start properly: {exc}") from exc
    if frame is None:
        raise SandboxUnavailableError("the sandbox ended while it started")
    protocol = _protocol_of(frame.payload)
    if protocol != PROTOCOL:
        raise SandboxUnavailableError(
            f"the runner speaks protocol {protocol}, this service {PROTOCOL}; reinstall it"
        )


def _protocol_of(payload: bytes) -> int:
    # Not trusted: preloaded modules, which the operator chose, have run before this was sent.
    try:
        hello: Any = json.loads(payload)
        protocol = hello["protocol"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise SandboxUnavailableError("the sandbox did not start properly: its HELLO is malformed") from exc
    if not isinstance(protocol, int):
        raise SandboxUnavailableError("the sandbox did not start properly: its HELLO is malformed")
    return protocol


class StartedProcess(Protocol):
    """What ends with a sandbox: the process that was started for it, or the one that was forked."""

    @property
    def pid(self) -> int:
        """Host id of a process that is not the code's."""
        ...

    async def wait(self) -> int:
        """Wait until every process has ended; returns the exit code, negative for a signal."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


@dataclass(kw_only=True)
class ProcessSandbox:
    """A started sandbox; ``pidfd`` is its first process, whose end ends all others."""

    process: StartedProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: OutputPipe
    pidfd: int
    #: Host id of the first process inside.
    first_pid: int
    spec: SandboxSpec
    #: None where this service has no control groups.
    group: Group | None
    kill_signal: signal.Signals = signal.SIGKILL
    #: Lists the processes inside where there is neither group nor namespace.
    list_processes: Callable[[], list[int]] | None = None
    scratch_dir: Path | None = None
    shares_user: bool = False
    #: Whether the fork server made it.
    is_forked: bool = False
    on_close: list[Callable[[], object]] = field(default_factory=list)
    _closed: bool = False
    #: Held while ``pidfd`` is used or closed: guards use it from other threads.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def alive(self) -> bool:
        """Whether its first process still runs; asks the kernel, safe from any thread."""
        with self._lock:
            if self.pidfd < 0:
                return False
            ended = select.poll()
            ended.register(self.pidfd, select.POLLIN)
            return not ended.poll(0)

    async def drain(self) -> None:
        """Wait until all that was printed so far has been read from ``output``."""
        # Polls, as no event reports an empty pipe; the event loop and the reader of `output` run meanwhile.
        while not self.output.is_empty:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def wait(self) -> ExitStatus:
        """Wait until every process inside is gone."""
        code = await self.process.wait()
        return ExitStatus(
            code=code if code >= 0 else 128 - code, limit=self.group.limit_hit() if self.group else None
        )

    def kill(self) -> None:
        """Kill the first process inside; the kernel kills the others with it."""
        # By descriptor, so that a reused process id cannot be hit. Killing the launcher instead would
        # return before all processes have ended, and leave a zombie.
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, self.kill_signal)

    @property
    def memory_bounded(self) -> bool:
        """Whether the kernel bounds the memory of all processes together."""
        return self.group is not None

    def usage(self) -> Usage:
        """Return what it uses now."""
        return self.group.usage() if self.group else usage_of(self.processes())

    def processes(self) -> list[int]:
        """Return the host ids of every process inside."""
        if self.group:
            listed = self.group.processes()
        else:
            listed = settled_listing(
                self.first_pid, self.list_processes or (lambda: processes_beside(self.first_pid))
            )
        # The launcher is a member of the group, but outside of the sandbox's namespaces; the first process of
        # a forked run has the fork server's mounts and network.
        return [pid for pid in listed if pid != self.process.pid]

    async def close(self) -> None:
        """Kill remaining processes, wait for them, release all resources."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        try:
            async with clean_up_timeout(GONE_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        finally:
            self.writer.close()
            self.output.close()
            with self._lock:
                os.close(self.pidfd)
                self.pidfd = -1
            await self._remove_group()
            for action in self.on_close:
                action()

    async def _remove_group(self) -> None:
        if self.group is None:
            return
        # Nearly always empty by now; killing remaining processes takes time, so that uses a thread.
        removed = (
            await asyncio.to_thread(self.group.remove) if self.group.is_populated() else self.group.remove()
        )
        if not removed:
            logger.bind(pid=self.first_pid).error("sandbox_group_not_removed")
