"""The guards of a sandbox and their supervisor: a guard that raises, stalls or cannot read ends the run.

A guard enforces a limit that the kernel does not: a periodic check of disk or memory (``watch``), the reader
of the output, a timer. Each check runs on a thread of its own, not on the event loop or its shared pool, so
neither a busy loop nor an exhausted pool delays it. One thread per process, the supervisor, compares for each
guard the time since ``begin`` with the time it may take. The supervisor uses nothing that sandboxed code can
slow down: it reads a clock and signals a process descriptor.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from loguru import logger

from broker_config.settings import SandboxSettings
from nekro.sandbox.driver import Sandbox
from nekro.sandbox.limits.processes import (
    UnsettledError,
    hold_of_all,
    names_bytes,
    shared_out,
    sockets_in_sockets,
    waiting_at,
)
from nekro.sandbox.limits.quota import Quota
from nekro.sandbox.models import Limit
from nekro_agent.durations import POLL_SECONDS

__all__ = [
    "GUARD_SECONDS",
    "EndRun",
    "Guard",
    "Guards",
    "disk_check",
    "memory_check",
    "watch",
]

#: Ends the run: the limit, and for ``Limit.GUARD`` the reason. Called from any thread.
EndRun = Callable[[Limit, str | None], None]

#: How late a guard may be before the run ends: a loaded host delays a check by seconds, and hostile code
#: gains nothing from a shorter delay than that of its limit.
GUARD_SECONDS: Final = 5.0
#: A check may take this share of the time between checks; an expensive check gets longer pauses.
_LARGEST_SHARE: Final = 1 / 20
#: Checks by the supervisor per shortest bound.
_CHECKS: Final = 10
#: Consecutive failures that end the run: a single one may be caused by a process that is just ending.
_MOST_FAILURES: Final = 2


class Guard:
    """The state of one guard: late when neither ``done`` nor ``begin`` follows ``begin`` in time."""

    def __init__(self, name: str, *, allowed_seconds: float = 0) -> None:
        self.name = name
        self.allowed_seconds = allowed_seconds
        #: Monotonic seconds of the last ``begin``; None when the guard is not pending.
        self.since: float | None = None

    def begin(self) -> None:
        """Become pending, or restart the time of a pending guard."""
        self.since = time.monotonic()

    def done(self) -> None:
        """Stop being pending until the next ``begin``."""
        self.since = None


class Guards:
    """The guards of one sandbox."""

    def __init__(self, *, alive: Callable[[], bool], end: EndRun, bound_seconds: float) -> None:
        """
        Args:
            alive: whether the sandbox still runs; must answer at once, from any thread.
            bound_seconds: how late a guard may be; a longer delay ends the run.
        """
        self._alive = alive
        self._end = end
        self.bound_seconds = bound_seconds
        self._guards: list[Guard] = []
        #: Checks that have not started, and when each is due.
        self._starts: list[tuple[float, Callable[[], None]]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = threading.Event()
        _SUPERVISOR.add(self)

    def add(self, name: str, *, allowed_seconds: float = 0) -> Guard:
        """Add a guard that is late after ``allowed_seconds`` and the bound, counted from its ``begin``."""
        guard = Guard(name, allowed_seconds=allowed_seconds)
        self._guards.append(guard)
        return guard

    def poll(self, name: str, check: Callable[[], Limit | None], *, every_seconds: float) -> None:
        """Call ``check`` periodically on a thread of its own, which starts after the first pause.

        ``check`` returns the limit that is exceeded, None when none is, and raises when it cannot check;
        it counts as completed only when it returned. Most runs end before the first check and have no
        cost for it.
        """
        guard = self.add(name, allowed_seconds=every_seconds)
        guard.begin()

        def start() -> None:
            thread = threading.Thread(
                target=self._poll, args=(guard, check, every_seconds), name=f"sandbox-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as exc:  # no more threads
                self.fail(name, exc)

        entry = (time.monotonic() + every_seconds, start)
        self._starts.append(entry)
        self._timers.append(asyncio.get_running_loop().call_later(every_seconds, self._start, entry))

    def task(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run a guard that is a coroutine on the event loop; its failure ends the run."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (exc := task.exception()) is not None:
                self.fail(name, exc)

        task = asyncio.create_task(work, name=f"sandbox-{name}")
        task.add_done_callback(ended)
        self._tasks.append(task)
        return task

    def fail(self, name: str, exc: BaseException) -> None:
        """End the run because a guard failed."""
        if self._closed.is_set():
            return
        logger.bind(guard=name).opt(exception=exc).error("sandbox_guard_failed")
        # The class alone: the message may name paths of the host, or contain text that the code chose.
        self._end(Limit.GUARD, f"the run was ended because its guard {name!r} failed ({_name_of(exc)})")

    def supervise(self, now: float) -> None:
        """End the run when a guard is late; start checks that a busy event loop has not started."""
        for entry in list(self._starts):
            if entry[0] <= now:
                self._start(entry)
        for guard in list(self._guards):
            since = guard.since
            late = 0.0 if since is None else now - since - guard.allowed_seconds
            if late > self.bound_seconds and not self._closed.is_set() and self._alive():
                logger.bind(guard=guard.name, seconds=round(late, 1)).error("sandbox_guard_stalled")
                self._end(
                    Limit.GUARD,
                    f"the run was ended because its guard {guard.name!r} stalled"
                    f" for {self.bound_seconds:g} s",
                )
                self.close()
                return

    def close(self) -> None:
        """Stop all guards; a check that is running ends by itself and its result is dropped.

        Safe from any thread; timers and tasks of the event loop are cancelled by ``stop``.
        """
        self._closed.set()
        _SUPERVISOR.discard(self)

    def stop(self) -> None:
        """Close, and cancel timers and tasks; only on the event loop's thread."""
        self.close()
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _start(self, entry: tuple[float, Callable[[], None]]) -> None:
        if self._closed.is_set():
            return
        try:  # removed first, as the event loop and the supervisor may both be here
            self._starts.remove(entry)
        except ValueError:
            return
        entry[1]()

    def _poll(self, guard: Guard, check: Callable[[], Limit | None], every_seconds: float) -> None:
        failures, pause = 0, 0.0
        while not self._closed.wait(pause) and self._alive():
            begin = time.monotonic()
            try:
                limit = check()
            except UnsettledError:  # not completed: the supervisor ends the run when that lasts too long
                pause = every_seconds
                continue
            except Exception as exc:
                failures += 1
                if self._closed.wait(POLL_SECONDS) or not self._alive():
                    return
                if failures == _MOST_FAILURES:
                    self.fail(guard.name, exc)
                    return
                pause = 0.0
                continue
            failures = 0
            guard.begin()
            if limit is not None:
                if not self._closed.is_set():
                    self._end(limit, None)
                return
            cost = time.monotonic() - begin
            pause = min(max(every_seconds, cost / _LARGEST_SHARE), GUARD_SECONDS / 5 + every_seconds)
            guard.allowed_seconds = pause


class _Supervisor:
    """Supervises the guards of all sandboxes of a process, on a thread that sleeps while there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._supervised: set[Guards] = set()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, guards: Guards) -> None:
        """Start to supervise the guards of one sandbox.

        Raises:
            RuntimeError: no thread can be started; without the supervisor no code may run.
        """
        with self._lock:
            self._supervised.add(guards)
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._run, name="sandbox-supervisor", daemon=True)
                self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()

    def discard(self, guards: Guards) -> None:
        """Stop supervising the guards of one sandbox; idempotent."""
        with self._lock:
            self._supervised.discard(guards)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with self._lock:
                supervised = list(self._supervised)
                if not supervised:
                    self._wanted.clear()
                    continue
            now = time.monotonic()
            for guards in supervised:
                _supervise_one(guards, now)
            time.sleep(min(guards.bound_seconds for guards in supervised) / _CHECKS)


def _supervise_one(guards: Guards, now: float) -> None:
    """Supervise one sandbox; an error must not stop the supervision of the others."""
    try:
        guards.supervise(now)
    except Exception:
        logger.exception("sandbox_supervisor_failed")


def _name_of(exc: BaseException) -> str:
    return type(exc).__name__


_SUPERVISOR: Final = _Supervisor()
# In a forked child the thread does not exist, and the lock may be held forever.
os.register_at_fork(after_in_child=_SUPERVISOR.__init__)  # type: ignore[misc]


def watch(
    guards: Guards,
    sandbox: Sandbox,
    quota: Quota | None,
    settings: SandboxSettings,
) -> None:
    """Check a sandbox's disk and memory until the guards are closed.

    Args:
        quota: None where the kernel bounds the shared directory.
    """
    quotas = {} if quota is None else {"disk": quota}
    if sandbox.scratch_dir is not None:
        quotas["tmp"] = Quota.of_scratch(sandbox.scratch_dir, settings)
    for name, watched in quotas.items():
        check = disk_check(sandbox, watched, most_file_bytes=settings.max_file_bytes)
        # Half as often as memory: measuring a directory costs more than reading counters.
        guards.poll(name, check, every_seconds=2 * POLL_SECONDS)
    if not sandbox.memory_bounded:
        guards.poll("memory", memory_check(sandbox, settings), every_seconds=POLL_SECONDS)


def memory_check(sandbox: Sandbox, settings: SandboxSettings) -> Callable[[], Limit | None]:
    """Return a check of the memory of all processes together; between two checks it may be exceeded."""

    def check() -> Limit | None:
        most_bytes = settings.memory_bytes - _kernel_bytes(sandbox)
        used_bytes = sandbox.usage().memory_bytes or 0
        # This counts shared pages once per process: cheap, and never too low.
        is_exceeded = used_bytes > most_bytes and shared_out(sandbox.processes()) > most_bytes
        return Limit.MEMORY if is_exceeded else None

    return check


def _kernel_bytes(sandbox: Sandbox) -> int:
    """Return the most kernel memory of the code: buffers of sockets and pipes, names in memory."""
    # Where /tmp is a directory of the host, its names are on disk and the disk check counts them.
    names = names_bytes(sandbox.processes()) if sandbox.scratch_dir is None else 0
    return hold_of_all(sandbox.processes, root=sandbox.spec.shared_dir).buffer_bytes() + names


def disk_check(sandbox: Sandbox, quota: Quota, *, most_file_bytes: int) -> Callable[[], Limit | None]:
    """Return a check of the disk space of the sandbox's files.

    Args:
        most_file_bytes: size assumed for a file whose size is not visible.
    """
    hidden: set[int] = set()

    def check() -> Limit | None:
        nonlocal hidden
        held = hold_of_all(sandbox.processes, root=quota.root)
        before, hidden = hidden, sockets_in_sockets(sandbox.processes(), held)
        if before & hidden:
            return Limit.DISK  # the files in flight in there cannot be counted
        used_bytes = held.disk_bytes(most_file_bytes=most_file_bytes)
        # The host's end of the channel is a socket too, and is not read at the maximum of calls in flight.
        used_bytes += waiting_at(sandbox.writer.get_extra_info("socket").fileno()) * most_file_bytes
        is_exceeded = quota.exceeded(unlinked=used_bytes, most_file_bytes=most_file_bytes)
        return Limit.DISK if is_exceeded else None

    return check
