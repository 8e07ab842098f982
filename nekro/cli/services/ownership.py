"""File locks that give the embedded services of a data directory to one process.

At most one process owns them (`nekro up`, or a command that started them for its own duration);
any number of commands borrow them. Both are file locks below ``<data_dir>/run``, which the kernel
releases when the process ends, so there are no stale pid files.

    owner.lock   exclusive, held by the owner until its process ends
    users.lock   shared, held by each borrower; the owner of a command's own system takes it
                 exclusively before it stops, so it never stops services that a borrower uses
    up.json      workers and gateway of the owner; present only while the system is ready
    starting     what an owner whose system starts waits for; written as long as that goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from nekro.base.plain import known_fields
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import ServiceError, SettingsError, UsageError
from nekro_agent.files.private_files import make_directory, open_private, write_private

__all__ = ["Ownership", "RunningSystem", "WorkerEntry", "read_running", "require_running"]


@dataclass(frozen=True, kw_only=True)
class WorkerEntry:
    """One worker process of a running system."""

    name: str
    lane: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class RunningSystem:
    """The content of ``up.json``."""

    #: The `nekro` command that owns the system: ``up``, or the one that started it for itself.
    command: str
    pid: int
    started_at: str
    workers: tuple[WorkerEntry, ...]
    #: URL of its gateway, if that takes the local key; "" if there is none.
    gateway_url: str = ""

    @property
    def lanes(self) -> frozenset[str]:
        """Lanes that have a worker."""
        return frozenset(worker.lane for worker in self.workers)


class Ownership:
    """The locks of one data directory, as one process holds them."""

    def __init__(self, data_dir: Path) -> None:
        """Create the data directory.

        Raises:
            SettingsError: it cannot be created.
        """
        self._run_dir = data_dir / "run"
        try:
            make_directory(self._run_dir)
        except OSError as exc:
            raise SettingsError(f"data directory {data_dir}: {exc.strerror}; set NEKRO_DATA_DIR") from exc
        self._owner_file: IO[str] | None = None

    def claim(self) -> bool:
        """Become the owner; False when another process is."""
        file = self._open("owner.lock")
        if not _try_lock(file, fcntl.LOCK_EX):
            file.close()
            return False
        self._owner_file = file
        # A killed owner leaves a stale file.
        self._record_path.unlink(missing_ok=True)
        return True

    @property
    def is_mine(self) -> bool:
        """Whether this process is the owner."""
        return self._owner_file is not None

    def publish(self, *, command: str, workers: tuple[WorkerEntry, ...], gateway_url: str = "") -> None:
        """Write ``up.json``: the system is ready. The file is replaced atomically."""
        running = RunningSystem(
            command=command,
            pid=os.getpid(),
            started_at=datetime.now(UTC).isoformat(),
            workers=workers,
            gateway_url=gateway_url,
        )
        write_private(self._record_path, json.dumps(asdict(running), indent=2) + "\n")

    def progress(self, text: str) -> None:
        """Tell waiting commands that the start of the system goes on, and what it waits for."""
        write_private(self._progress_path, text)

    def withdraw(self) -> None:
        """Undo ``publish``: new commands wait for the next owner instead of borrowing."""
        self._record_path.unlink(missing_ok=True)

    def release(self) -> None:
        """Stop being the owner."""
        if self._owner_file is not None:
            self.withdraw()
            self._owner_file.close()
            self._owner_file = None

    @contextlib.contextmanager
    def borrow(self) -> Iterator[None]:
        """Prevent the owner of a command's own system from stopping it."""
        with self._open("users.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    async def wait_for_borrowers(self) -> bool:
        """Wait until no process borrows; True when one did."""
        with self._open("users.lock") as file:
            waited = False
            while not _try_lock(file, fcntl.LOCK_EX):
                waited = True
                await asyncio.sleep(POLL_SECONDS)
        return waited

    def owner(self) -> RunningSystem | None:
        """Return what the present owner has published; None when there is no owner or it is not ready."""
        return read_running(self._run_dir.parent)

    async def wait_for_owner(
        self, *, seconds: float, on_wait: Callable[[str], None] = lambda _: None
    ) -> RunningSystem | None:
        """Wait for another process's system to be ready; None when that process ended meanwhile.

        Args:
            seconds: how long it may report no progress.
            on_wait: called with each report of its progress.

        Raises:
            ServiceError: it is neither ready nor gone, and has not reported progress for ``seconds``.
        """
        deadline, seen = time.monotonic() + seconds, self._read_progress()
        while time.monotonic() < deadline:
            reported = self._read_progress()
            if reported != seen:
                deadline, seen = time.monotonic() + seconds, reported
                on_wait(f"another command starts the services: {reported[1]}")
            running = self.owner()
            if running is not None:
                return running
            if not self.is_owned():
                return None
            await asyncio.sleep(POLL_SECONDS)
        raise ServiceError(
            f"another process is still starting or stopping the services of {self._run_dir.parent} after"
            f" {seconds:.0f} s; `fuser {self._run_dir / 'owner.lock'}` shows its process id"
        )

    def is_owned(self) -> bool:
        """Whether any process owns the services."""
        with self._open("owner.lock") as file:
            return not _try_lock(file, fcntl.LOCK_SH)

    def _read_progress(self) -> tuple[int, str]:
        try:
            return self._progress_path.stat().st_mtime_ns, self._progress_path.read_text("utf-8")
        except OSError:
            return 0, ""

    @property
    def _progress_path(self) -> Path:
        return self._run_dir / "starting"

    @property
    def _record_path(self) -> Path:
        return self._run_dir / "up.json"

    def _open(self, name: str) -> IO[str]:
        return open_private(self._run_dir / name, "a", encoding="utf-8")


def read_running(data_dir: Path) -> RunningSystem | None:
    """Return the system that runs on a data directory; None when there is none, or its owner has ended."""
    path = data_dir / "run" / "up.json"
    try:
        values = json.loads(path.read_text("utf-8"))
        with open_private(path.parent / "owner.lock", "a", encoding="utf-8") as file:
            if _try_lock(file, fcntl.LOCK_SH):
                return None
    except (OSError, ValueError):
        return None
    workers = tuple(WorkerEntry(**known_fields(WorkerEntry, entry)) for entry in values["workers"])
    return RunningSystem(**known_fields(RunningSystem, values) | {"workers": workers})


def require_running(data_dir: Path) -> RunningSystem:
    """Return the system that runs on a data directory.

    Raises:
        UsageError: none does; the message says how to start one.
    """
    running = read_running(data_dir)
    if running is None:
        raise UsageError(
            f"no system runs on {data_dir}; start `nekro up` there, or set NEKRO_BROKER__URL to a broker"
        )
    return running


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
