"""The processes of one forked run, as the host follows and verifies them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Final

from nekro.sandbox.limits import proc_files
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import SandboxUnavailableError

__all__ = ["ForkedProcess", "ids_of", "verify_namespaces"]

#: Namespaces that no run shares with the host or the fork server.
_OWN: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


class ForkedProcess:
    """The process of a run, and the first process of its namespaces, whose end ends the run."""

    def __init__(self, *, process: int, first: int, on_stuck: Callable[[], None]) -> None:
        """
        Args:
            process: descriptor of the run's process; closed when all have ended, as ``first`` is.
            on_stuck: called when the process has ended and nothing reports how.
        """
        self.process = process
        self.first = first
        #: Host id of the first process.
        self.pid = ids_of(first)[0]
        #: Host id of the run's process, and the id that the fork server knows.
        ids = ids_of(process)
        self.run_pid, self.known_pid = ids[0], ids[-2]
        self._on_stuck = on_stuck
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._code: asyncio.Future[int] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self.on_gone: list[Callable[[], object]] = []
        loop.add_reader(process, self._process_ended)
        loop.add_reader(first, self._first_ended)

    @property
    def is_gone(self) -> bool:
        """Whether every process has ended."""
        return self._gone.done()

    async def wait(self) -> int:
        """Wait until every process has ended; returns the exit code, negative for a signal."""
        await asyncio.shield(self._gone)
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        """Kill every process."""
        if not self._gone.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)

    def report(self, status: int) -> None:
        """Take the exit status of the run's process, and end what it left."""
        if not self._code.done():
            self._code.set_result(os.waitstatus_to_exitcode(status))
        self.kill()

    def give_up(self) -> None:
        """Take it that the process was killed, as the fork server has ended."""
        self.report(signal.SIGKILL)
        self._first_ended()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self.process)
        if not self._code.done():
            self._loop.call_later(FRESH_SECONDS, self._check_report)

    def _check_report(self) -> None:
        if not self._code.done():
            self._on_stuck()
            self._loop.call_later(FRESH_SECONDS, self.report, signal.SIGKILL)

    def _first_ended(self) -> None:
        if self._gone.done():
            return
        self._loop.remove_reader(self.process)
        self._loop.remove_reader(self.first)
        os.close(self.process)
        os.close(self.first)
        self._gone.set_result(None)
        if not self._code.done():
            self._loop.call_later(FRESH_SECONDS, self.report, signal.SIGKILL)
        for action in self.on_gone:
            action()


def ids_of(pidfd: int) -> list[int]:
    """Return the ids of a process from this process's namespace on inwards."""
    ids = proc_files.field_of(proc_files.read(f"/proc/self/fdinfo/{pidfd}"), b"NSpid")
    return [int(word) for word in ids.split()]


@cache
def _namespaces_here(pid: int) -> frozenset[int]:
    """Return the namespaces of this process, whose id is the key of the cache."""
    return frozenset(_namespace("self", name) for name in _OWN)


def _namespace(pid: int | str, name: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino


def verify_namespaces(process: ForkedProcess, template: int) -> None:
    """Read back from the kernel that a run shares no namespace with the host or the fork server.

    Raises:
        SandboxUnavailableError: it shares one.
    """
    here = _namespaces_here(os.getpid())
    shared = [
        name
        for name in _OWN
        if (number := _namespace(process.run_pid, name)) in here or number == _namespace(template, name)
    ]
    if shared:
        raise SandboxUnavailableError(
            f"the sandbox is not isolated: it shares the namespaces {', '.join(shared)}; no code was run"
        )
