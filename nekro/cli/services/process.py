"""Run a `nekro` command as a child process: start, ready handshake, output, stop.

Parent and child share a socket pair. The child writes a line of JSON for each step of its start, and one when
it is ready. It stops within seconds when the parent's end closes, so a killed parent leaves no worker behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from broker_config.settings import Settings
from nekro.base.tasks import clean_up_timeout
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS, PROGRESS_SECONDS
from nekro_agent.errors import ServiceError
from nekro_agent.tools.visible_text import visible

__all__ = [
    "GATEWAY",
    "MAX_LINE_BYTES",
    "START_SECONDS",
    "ChildProcess",
    "ChildSpec",
    "LineSink",
    "Supervised",
    "addresses",
    "attach_to_supervisor",
    "describe_exit",
    "flower_spec",
    "gateway_spec",
    "stop_without_parent",
    "worker_spec",
]

#: How long a process that starts may make no progress, and a scene of the demo may take to end.
START_SECONDS: Final = 60.0
#: Name of the child that serves the HTTP API.
GATEWAY: Final = "gateway"
_TAIL_LINES: Final = 8
#: Log records are shorter; longer lines of other output are left out.
MAX_LINE_BYTES: Final = 1 << 20
#: Prefix of the last line that a failed `nekro` command prints.
_ERROR: Final = "error: "


class LineSink(Protocol):
    """Where a child's output goes, line by line."""

    def write(self, line: str) -> None:
        """Write one line, given without its line end."""
        ...

    def close(self) -> None:
        """Close the sink: the child has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """Which command to start; made by ``worker_spec``, ``gateway_spec`` and ``flower_spec``."""

    #: Unique in its system; prefix of its output, and for workers Celery's ``<name>@<host>``.
    name: str
    #: Lane that it serves; "" when it is not a worker.
    lane: str
    #: Arguments of `nekro`.
    arguments: tuple[str, ...]
    #: Open descriptors that it inherits; they stay open here, for its next start.
    descriptors: tuple[int, ...] = ()


def worker_spec(
    lane: str, *, name: str, concurrency: int | None = None, needs_model: bool = True
) -> ChildSpec:
    """Describe a worker.

    Args:
        concurrency: None leaves it to the settings.
        needs_model: whether a rounds worker refuses to start without a language model.
    """
    arguments = ["worker", "--lane", lane, "--name", name]
    if concurrency is not None:
        arguments += ["--concurrency", str(concurrency)]
    if not needs_model:
        arguments.append("--without-model")
    return ChildSpec(name=name, lane=lane, arguments=tuple(arguments))


def flower_spec(port: int) -> ChildSpec:
    """Describe a Flower on loopback."""
    return ChildSpec(name="flower", lane="", arguments=("flower", "--port", str(port)))


def gateway_spec(listener: socket.socket) -> ChildSpec:
    """Describe a gateway that serves an open socket; connections wait there while it is started again."""
    number = listener.fileno()
    return ChildSpec(
        name=GATEWAY, lane="", arguments=("gateway", "--listen-fd", str(number)), descriptors=(number,)
    )


class Started(Protocol):
    """What this module uses of ``asyncio.subprocess.Process``."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        ...

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it prints."""
        ...

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        ...

    def send_signal(self, signal: int) -> None:
        """Send a signal; raises ProcessLookupError if it has ended."""
        ...


class ChildProcess:
    """A started child; made by ``start`` and ``attach``."""

    def __init__(self, spec: ChildSpec, process: Started, channel: socket.socket) -> None:
        self.spec = spec
        self._process = process
        self._channel = channel
        self._received = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pump: asyncio.Task[None] | None = None
        #: Beginning of the tags of a worker's deliveries; "" until it is ready, and for other processes.
        self.holder = ""

    @classmethod
    async def start(
        cls, spec: ChildSpec, *, environment: Mapping[str, str], directory: Path | None, sink: LineSink
    ) -> ChildProcess:
        """Start the process; ``sink`` gets each line that it prints and is closed at its end."""
        ours, theirs = socket.socketpair()
        try:
            # `-P`: a folder named `nekro` in the working directory must not be imported. A session of its
            # own: Ctrl-C reaches only the parent, which then stops its workers in order.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "nekro.cli.main", *spec.arguments,
                "--supervisor-fd", str(theirs.fileno()),
                env=dict(environment), cwd=directory, stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno(), *spec.descriptors], start_new_session=True, limit=MAX_LINE_BYTES,
            )  # fmt: skip
        except BaseException:
            ours.close()
            sink.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls.attach(spec, process, ours, sink)

    @classmethod
    def attach(
        cls, spec: ChildSpec, process: Started, channel: socket.socket, sink: LineSink
    ) -> ChildProcess:
        """Supervise a process that runs already.

        Args:
            channel: the parent's end of the socket pair, which does not block.
        """
        child = cls(spec, process, channel)
        child._pump = asyncio.create_task(child._pass_on(sink))
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def ready(
        self, *, on_wait: Callable[[str], None] = lambda _: None, stuck_seconds: float = START_SECONDS
    ) -> str:
        """Wait until it is ready; returns its Celery node name, "" when it is not a worker.

        There is no limit while it makes progress: while it begins steps, or uses its processor.

        Args:
            on_wait: called every ten seconds with what it does, for people.
            stuck_seconds: how long it may make no progress.

        Raises:
            ServiceError: it ended first or makes no progress; quotes what it last printed.
        """
        began = moved = time.monotonic()
        doing, used = "starting", 0.0
        while True:
            try:
                async with asyncio.timeout(min(PROGRESS_SECONDS, stuck_seconds)):
                    line = await self._read_line()
            except TimeoutError:
                before, used = used, _cpu_seconds(self.pid)
                if used > before:
                    moved = time.monotonic()
                elif time.monotonic() - moved >= stuck_seconds:
                    fault = f"has made no progress for {stuck_seconds:g} s (it was {doing})"
                    raise ServiceError(self._fault(fault)) from None
                on_wait(f"waiting for {self.spec.name} for {time.monotonic() - began:.0f} s: it is {doing}")
                continue
            if not line:
                code = await self.wait()
                raise ServiceError(self._fault(f"ended with {describe_exit(code)} before it was ready"))
            said = json.loads(line)
            if "node" in said:
                self.holder = str(said.get("holder", ""))
                return str(said["node"])
            doing, moved = str(said["doing"]), time.monotonic()

    async def wait(self) -> int:
        """Wait for the end and the last line of output; returns the exit code."""
        code = await self._process.wait()
        if self._pump is not None:
            # A grandchild may still hold the pipe; the child's own output is complete.
            await asyncio.wait([self._pump], timeout=CLOSE_STEP_SECONDS)
            self._pump.cancel()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, *, warm_seconds: float) -> int:
        """Stop with SIGTERM, after ``warm_seconds`` with SIGQUIT, then SIGKILL; returns the exit code."""
        for number, patience in (
            (signal.SIGTERM, warm_seconds),
            (signal.SIGQUIT, CLOSE_STEP_SECONDS),
            (signal.SIGKILL, CLOSE_STEP_SECONDS),
        ):
            self.signal(number)
            with contextlib.suppress(TimeoutError):
                async with clean_up_timeout(patience):
                    await self._process.wait()
                break
        self._channel.close()
        return await self.wait()

    async def _read_line(self) -> bytes:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._received:
            try:
                chunk = await loop.sock_recv(self._channel, 4096)
            except ConnectionError:
                return b""
            if not chunk:
                return b""
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    async def _pass_on(self, sink: LineSink) -> None:
        with contextlib.closing(sink):
            await self._pass_lines(sink)

    async def _pass_lines(self, sink: LineSink) -> None:
        stream = self._process.stdout
        while stream is not None:
            try:
                raw = await stream.readline()
            except ValueError:
                # asyncio has dropped the line; the lines after it are read as usual.
                sink.write(f"[a line of more than {MAX_LINE_BYTES} bytes is left out]")
                continue
            if not raw:
                return
            line = visible(raw.decode("utf-8", "replace").rstrip("\n"))
            self._tail.append(line)
            sink.write(line)

    def _fault(self, what: str) -> str:
        if self._tail and self._tail[-1].startswith(_ERROR):
            # The child's own error line names the fault and its fix.
            return f"{self.spec.name} {what}: {self._tail[-1].removeprefix(_ERROR)}"
        said = "\n".join(f"    {line}" for line in self._tail)
        return f"{self.spec.name} {what}" + (f"; its last output:\n{said}" if said else "")


def addresses(url: str, settings: Settings) -> str:
    """Describe where a gateway serves: URL, file of the local key, and a link that opens the console once.

    Args:
        settings: with every URL resolved.

    Raises:
        SettingsError: the local key cannot be read.
    """
    from nekro.gateway.access.keys import LocalKey, is_local
    from nekro.gateway.access.signed_texts import CODE_SECONDS, make_code

    parts = [f"HTTP API on {url}"]
    key = LocalKey.open(settings) if is_local(settings) else None
    if key is not None:
        parts.append(f"key in {key.path}")
    if settings.gateway.console and url.startswith("http"):
        link, hint = f"{url}/console/", ""
        if key is not None:
            link += f"#/login?code={make_code(settings, key_id=key.id)}"
            hint = f" (once, within {CODE_SECONDS // 60} minutes)"
        parts.append(f"console on {link}{hint}")
    return "; ".join(parts)


def describe_exit(code: int) -> str:
    """Return an exit code as text: the name of the signal when it is negative."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def stop_without_parent() -> None:
    """Stop this process, whose parent was killed: gracefully for a second, then at once, then in any case.

    The calls of a worker are left to others, as if the worker had been killed too. A system that starts on
    the same data directory does not meet the processes of the one before.
    """
    for number, patience in (
        (signal.SIGTERM, FRESH_SECONDS),
        (signal.SIGQUIT, CLOSE_STEP_SECONDS),
        (signal.SIGKILL, CLOSE_STEP_SECONDS),
    ):
        os.kill(os.getpid(), number)
        time.sleep(patience)


class Supervised:
    """In a child, its end of the socket; made by ``attach_to_supervisor``."""

    def __init__(self, channel: socket.socket, holder: str) -> None:
        self._channel, self._holder = channel, holder

    def ready(self, node: str) -> None:
        """Report that this process is ready; a worker is known to Celery by the node name."""
        self._say(node=node, pid=os.getpid(), holder=self._holder)

    def does(self, step: str) -> None:
        """Report what this process does next, as in "importing weather"."""
        self._say(doing=step)

    def _say(self, **values: object) -> None:
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps(values).encode() + b"\n")


def attach_to_supervisor(descriptor: int, on_gone: Callable[[], None], *, holder: str = "") -> Supervised:
    """In the child, watch the parent's end of the socket; returns what reports to the parent.

    ``on_gone`` runs in a thread when the parent has ended or closed the socket.

    Args:
        holder: beginning of the tags of a worker's deliveries.
    """
    import threading

    channel = socket.socket(fileno=descriptor)
    channel.setblocking(True)  # the parent may have a time limit for all new sockets, which marks them
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        with channel, contextlib.suppress(OSError):
            while channel.recv(1):
                pass
        on_gone()

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
    return Supervised(channel, holder)


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended; 0.0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
