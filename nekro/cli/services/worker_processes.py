"""The template of workers of `nekro up`, and what follows when a worker process has ended by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker_config.app import create_app
from broker_config.settings import Settings
from broker_config.urls import is_redis
from nekro.base.forks import adopt_orphans
from nekro.broker.delivery.orphans import Orphan, Orphans
from nekro.cli.services.process import MAX_LINE_BYTES, ChildProcess, ChildSpec, LineSink, describe_exit
from nekro_agent.durations import CLOSE_STEP_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import OutcomeUnknownError, ServiceError
from storage.engine import Database

__all__ = [
    "ForkedProcess",
    "ReleasedCalls",
    "WorkerTemplate",
    "is_crash",
    "release_calls",
]


_ANSWER_BYTES: Final = 4096


class WorkerTemplate:
    """A process whose forks are workers; made by ``start``."""

    def __init__(self, process: ChildProcess, requests: socket.socket) -> None:
        self._process, self._requests = process, requests
        self._lock = asyncio.Lock()

    @classmethod
    async def start(
        cls, *, environment: Mapping[str, str], sink: LineSink, on_wait: Callable[[str], None]
    ) -> WorkerTemplate:
        """Start it, and wait until it has imported the plugins.

        Raises:
            ServiceError: it did not become ready.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            # The name makes its command line, which becomes that of the workers, long enough for theirs.
            arguments = ("worker", "--name", "template", "--template-fd", str(theirs.fileno()))
            spec = ChildSpec(name="template", lane="", arguments=arguments, descriptors=(theirs.fileno(),))
            try:
                process = await ChildProcess.start(spec, environment=environment, directory=None, sink=sink)
            except BaseException:
                ours.close()
                raise
        template = cls(process, ours)
        try:
            await process.ready(on_wait=on_wait)
        except BaseException:
            await template.close()
            raise
        return template

    async def fork(self, spec: ChildSpec, *, sink: LineSink) -> ChildProcess:
        """Start a worker as a fork; ``sink`` gets its output, as in ``ChildProcess.start``.

        Raises:
            ServiceError: there is no fork; the message says why. The sink is still open.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        learn, tell = os.pipe()
        try:
            try:
                async with self._lock, asyncio.timeout(PROGRAM_SECONDS):
                    pid = await self._request(spec, [theirs.fileno(), tell])
            finally:
                theirs.close()
                os.close(tell)
            process = ForkedProcess(pid)
        except BaseException as exc:
            ours.close()
            os.close(learn)
            if isinstance(exc, OSError):
                raise ServiceError(f"the template of workers does not answer ({exc})") from exc
            raise
        process.stdout = await _reader(learn)
        return ChildProcess.attach(spec, process, ours, sink)

    async def close(self) -> None:
        """End it; workers that are its forks run on."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            if self._process.exit_code is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.stop(warm_seconds=CLOSE_STEP_SECONDS)

    async def _request(self, spec: ChildSpec, descriptors: list[int]) -> int:
        request = {"arguments": spec.arguments, "supervisor": os.getpid()}
        adopt_orphans(True)
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
            answer = await asyncio.get_running_loop().sock_recv(self._requests, _ANSWER_BYTES)
        finally:
            adopt_orphans(False)
        if not answer:
            raise ServiceError("the template of workers has ended")
        said = json.loads(answer)
        if "refusal" in said:
            raise ServiceError(f"the template of workers forks none: {said['refusal']}")
        return int(said["pid"])


class ForkedProcess:
    """A child of this process that another one forked; the part of ``asyncio.subprocess.Process`` in use."""

    def __init__(self, pid: int) -> None:
        """Watch for its end on the running loop."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        await self._ended.wait()
        assert self.returncode is not None  # noqa: S101 - set before the event
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self.returncode is not None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._descriptor)
        self._ended.set()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


#: Signals that another process sends; the others come from what the process itself did.
_FROM_OUTSIDE: Final = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}
)


@dataclass(frozen=True, kw_only=True)
class ReleasedCalls:
    """The calls that a worker ran when it ended."""

    calls: Sequence[Orphan] = ()
    #: Whether the only one was answered; otherwise they were delivered again.
    is_answered: bool = False


async def release_calls(settings: Settings, child: ChildProcess, code: int) -> ReleasedCalls:
    """Let the callers of a worker's calls know at once.

    If the worker ran one call and ended by itself (a crash, ``os._exit``), that call ended it: its caller
    gets ``OutcomeUnknownError`` with the reason, and the call is not repeated. Otherwise the calls are
    delivered again, as after the end of their leases: a worker may be killed for reasons of its host.

    Args:
        settings: with every URL filled.
        code: exit code, negative for a signal.

    Raises:
        NekroError: broker or database do not answer; the leases will expire.
    """
    url = settings.broker.url
    if not child.holder or url is None or not is_redis(url):
        return ReleasedCalls()  # not ready yet; RabbitMQ delivers again when a connection is lost
    await _end_claims(settings, f"{child.spec.lane}@{socket.gethostname()}:{child.pid}")
    is_own_end = code > 0 or is_crash(code)
    calls = await asyncio.to_thread(_take, settings, child, _reason(code) if is_own_end else None)
    return ReleasedCalls(calls=calls, is_answered=is_own_end and len(calls) == 1)


def is_crash(code: int) -> bool:
    """Whether a process with this exit code ended by a signal that it caused itself."""
    return code < 0 and -code not in _FROM_OUTSIDE


def _take(settings: Settings, child: ChildProcess, reason: str | None) -> Sequence[Orphan]:
    app = create_app(settings, lane=child.spec.lane)
    try:
        answer = None if reason is None else OutcomeUnknownError(reason)
        return Orphans(app, child.holder).take(answer=answer)
    finally:
        app.close()


def _reason(code: int) -> str:
    return (
        f"the call ended its worker process ({describe_exit(code)}), which ran no other call; it is not "
        "repeated, and its effect may or may not have happened"
    )


async def _end_claims(settings: Settings, worker: str) -> None:
    async with (
        Database(settings.database, settings.data_dir) as database,
        database.autocommit() as transaction,
    ):
        await transaction.calls.end_claims(worker)
