"""The host's link to one running fork server: requests, answers, and what happens when none comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loguru import logger

from nekro.sandbox.drivers.forked import ForkedProcess
from nekro.sandbox.drivers.isolated import Launched
from nekro.sandbox.drivers.process import start_printing
from nekro.sandbox.limits.guards import GUARD_SECONDS
from nekro.sandbox.streams import OutputPipe
from nekro.sandbox.users import UserHold
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["ForkLink", "Kind", "LaunchedServer", "launch_server"]

#: How long a run waits for its process; then it is started without the fork server.
_FORK_SECONDS: Final = 2.0
_MESSAGE_BYTES: Final = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a fork server has in common with all its runs."""

    layers: tuple[Path, ...]
    preload: tuple[str, ...]
    #: Packages that its template imports where they exist.
    packages: tuple[str, ...]
    #: Parents of the chats' directories, for a service that is an ordinary user; else empty.
    areas: tuple[Path, ...]


@dataclass(kw_only=True)
class LaunchedServer(Launched):
    output: OutputPipe

    async def words(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_STEP_SECONDS):
                return (await self.output.read(4096)).decode("utf-8", "replace")
        return ""

    async def abandon(self) -> None:
        await super().abandon()
        self.output.close()


async def launch_server(
    command: Sequence[str], fds: Sequence[int], *, control: socket.socket
) -> LaunchedServer:
    process, output, mark = await start_printing(command, [control.fileno(), *fds])
    control.close()
    return LaunchedServer(process=process, mark=mark, output=output)


@dataclass(kw_only=True, eq=False)
class ForkLink:
    """One running fork server."""

    kind: Kind
    launched: LaunchedServer
    #: Descriptor of the keeper.
    pidfd: int
    control: socket.socket
    hold: UserHold
    #: Descriptor of the template; -1 while there is none.
    template: int = -1
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    #: Requests without an answer, also those whose callers have stopped waiting.
    waiting: dict[int, asyncio.Future[tuple[int, int]]] = field(default_factory=dict)
    running: dict[int, ForkedProcess] = field(default_factory=dict)
    is_lost: bool = False
    #: Takes no more runs; closed when the last one has ended.
    is_retired: bool = False
    numbers: Iterator[int] = field(default_factory=itertools.count)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def listen(self) -> None:
        """Receive messages."""
        self.control.setblocking(False)
        asyncio.get_running_loop().add_reader(self.control.fileno(), self._receive)

    def log_output(self) -> None:
        """Log what it prints from now on: a failed import, or why it ended."""
        self._begin(self._log_output(), "sandbox-fork-server-output")

    async def _log_output(self) -> None:
        while data := await self.launched.output.read(_MESSAGE_BYTES):
            text = data.decode("utf-8", "replace").strip()
            logger.bind(text=text).warning("sandbox_fork_server_printed")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _receive(self) -> None:
        while not self.is_lost:
            try:
                data, fds, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.lose()
                return
            self._act(json.loads(data), fds)

    def _act(self, message: dict[str, Any], fds: list[int]) -> None:
        if "run" in message:
            answer = self.waiting.pop(message["run"], None)
            if answer is None or answer.done():  # it came too late
                signal.pidfd_send_signal(fds[1], signal.SIGKILL)
                _close(fds)
            else:
                answer.set_result((fds[0], fds[1]))
        elif "ended" in message:
            process = self.running.pop(message["ended"], None)
            if process is not None:
                process.report(message["status"])
        elif "template" in message:
            self._drop_template()
            self.template = fds[0] if fds else -1
            if fds:
                self.ready.set()
            else:
                self._refuse_waiting("the template has ended")
                self._expect_template()

    def _refuse_waiting(self, reason: str) -> None:
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(SandboxUnavailableError(reason))
        self.waiting.clear()

    def lose(self) -> None:
        """Take it that it has ended, and its runs with it."""
        if self.is_lost:
            return
        self.is_lost = True
        asyncio.get_running_loop().remove_reader(self.control.fileno())
        self._refuse_waiting("the fork server has ended")
        self.ready.set()
        for process in list(self.running.values()):
            process.give_up()
        self.running.clear()
        self._drop_template()

    def _drop_template(self) -> None:
        if self.template >= 0:
            os.close(self.template)
            self.template = -1

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.pidfd < 0

    @property
    def is_usable(self) -> bool:
        """Whether it runs and is not about to end."""
        return not (self.is_lost or self.is_retired)

    @property
    def takes_runs(self) -> bool:
        """Whether it can fork now: it has a template, which has answered everything in time."""
        is_late = any(answer.done() for answer in self.waiting.values())
        return self.template >= 0 and self.is_usable and not is_late

    def kill_template(self) -> None:
        """End a template that does not answer; the keeper reports its runs, and starts another one."""
        if self.template >= 0:
            logger.warning("sandbox_fork_template_killed")
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.template, signal.SIGKILL)
            self._drop_template()
            self._refuse_waiting("the template was ended")
            self._expect_template()

    def _expect_template(self) -> None:
        """Take no more runs when there is no new template after a while."""

        def check() -> None:
            if self.template < 0 and not self.is_lost:
                self.retire()

        asyncio.get_running_loop().call_later(PROGRAM_SECONDS, check)

    def _check_answer(self, number: int) -> None:
        if number in self.waiting and not self.is_lost:
            self.kill_template()

    async def request(self, fds: Sequence[int]) -> ForkedProcess:
        """Return the process of a new run.

        Raises:
            SandboxUnavailableError: there is none in time.
        """
        number = next(self.numbers)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[int, int]] = loop.create_future()
        self.waiting[number] = answer
        try:
            socket.send_fds(self.control, [b'{"run": %d}' % number], fds)
        except OSError as exc:
            del self.waiting[number]
            raise SandboxUnavailableError(f"the fork server cannot be reached: {exc}") from exc
        try:
            async with asyncio.timeout(_FORK_SECONDS):
                process, first = await answer
        except TimeoutError as exc:
            # Cancelled by the timeout: what answers it later is killed. A loaded host may delay it.
            loop.call_later(GUARD_SECONDS, self._check_answer, number)
            raise SandboxUnavailableError("the fork server did not answer in time") from exc
        forked = ForkedProcess(process=process, first=first, on_stuck=self.kill_template)
        self.running[forked.known_pid] = forked
        forked.on_gone.append(self._close_if_retired)
        return forked

    def retire(self) -> None:
        """Take no more runs, and end with the last one."""
        self.is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self.is_retired and all(process.is_gone for process in self.running.values()):
            self._begin(self.close(), "sandbox-fork-server-end")

    async def close(self) -> None:
        """End it and everything that it started."""
        if self.is_closed:
            return
        pidfd, self.pidfd = self.pidfd, -1
        self.lose()
        self.control.close()
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                await self.launched.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await self.launched.process.wait()
        os.close(pidfd)
        self.launched.output.close()
        self.hold.release()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
