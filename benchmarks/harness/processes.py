"""Child processes of the harness: start in a session of their own, stop by id, measure peak memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = [
    "Child",
    "cpu_seconds",
    "descendants",
    "free_port",
    "interrupted_by_sigterm",
    "local_headers",
    "peak_bytes",
]

_STOP_SECONDS = 10.0
_LOG_TAIL_BYTES = 2000


def interrupted_by_sigterm() -> None:
    """Let SIGTERM stop servers and workers as Ctrl-C does; call it first in ``main``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def local_headers(data_dir: Path) -> dict[str, str]:
    """Return the header with the local key of a data directory; none before a gateway has written it."""
    path = data_dir / "secrets" / "api.key"
    return {"Authorization": f"Bearer {path.read_text('ascii').strip()}"} if path.exists() else {}


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A subprocess that leads its own session and prints to a log file."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        piped: bool = False,
    ) -> None:
        self.log = log
        with log.open("ab") as words:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else words,
                stderr=words,
                env=environment,
                cwd=directory,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def ended(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return (its stdin, its stdout) of a piped child."""
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("this child was not started with pipes")
        return stdin, stdout

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def stop(self) -> None:
        """Terminate it, wait, then kill the remaining processes of its process group."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        # A group's id is not reused while the group has a process: this kills processes of the ended
        # leader, or none.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(_STOP_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, user and system, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pids: Sequence[int]) -> int | None:
    """Return the sum of the peak resident sizes (VmHWM) of processes and their running descendants.

    Shared pages are counted for each process. None where ``/proc`` does not show it.
    """
    peaks = [_high_water_bytes(pid) for root in pids for pid in (root, *descendants(root))]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known else None


def _high_water_bytes(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.split("\n"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def descendants(pid: int) -> Iterator[int]:
    """Yield the running processes below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The command in parentheses may contain spaces; the parent is the second field after it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        waiting += children
        yield from children
