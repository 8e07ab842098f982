"""The supervisor of a sandbox's guards: one that raises, stalls or cannot read ends the run.

A guard is whatever enforces a limit from outside of the kernel: a look at the disk or the memory, the
pump of the output, a timer. Looks run on a thread each, not on the event loop and not on its shared
pool, so neither a busy loop nor an exhausted pool delays them. One thread per process, the judge,
compares for each guard how long it has owed its next sign with how long it may take. The judge touches
nothing that sandboxed code can slow down: it reads a clock and signals a process descriptor.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from loguru import logger

from sandbox.models import Limit
from sandbox.processes import UnsettledError

__all__ = ["EndRun", "Guard", "Guards"]

#: Ends the run: the limit, and for ``Limit.GUARD`` the reason. Called from any thread.
EndRun = Callable[[Limit, str | None], None]

#: A look may cost this part of the time between looks, however many files there are.
_LARGEST_SHARE: Final = 1 / 20
#: A run must not be able to buy longer pauses by making looks expensive.
_LONGEST_PAUSE_SECONDS: Final = 1.0
#: How many times in the shortest bound the judge looks.
_JUDGEMENTS: Final = 10
#: How long a sandbox whose look failed may take to be seen as ended.
_ENDING_SECONDS: Final = 0.05
#: How much earlier than asked for the event loop may call.
_CLOCK_SECONDS: Final = 0.01
#: Failures in a row of a sandbox that runs on: one may be a process that ends in an unlucky moment.
_MOST_FAILURES: Final = 2


class Guard:
    """What one guard owes: a sign within ``allowed_seconds`` plus the bound, counted from ``begin``."""

    def __init__(self, name: str, *, allowed_seconds: float = 0) -> None:
        self.name = name
        self.allowed_seconds = allowed_seconds
        #: Monotonic seconds since which a sign is owed; None when none is.
        self.since: float | None = None

    def begin(self) -> None:
        """Owe a sign from now on."""
        self.since = time.monotonic()

    def done(self) -> None:
        """Owe nothing until the next ``begin``."""
        self.since = None


class Guards:
    """The guards of one sandbox."""

    def __init__(self, *, alive: Callable[[], bool], end: EndRun, bound_seconds: float) -> None:
        """
        Args:
            alive: whether anything is left to guard; must answer at once, from any thread.
            bound_seconds: how late a guard may be; more ends the run.
        """
        self._alive = alive
        self._end = end
        self.bound_seconds = bound_seconds
        self._guards: list[Guard] = []
        #: Looks that have not begun, with when they are due.
        self._starts: list[tuple[float, Callable[[], None]]] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = threading.Event()
        _JUDGE.add(self)

    def add(self, name: str, *, allowed_seconds: float = 0) -> Guard:
        """Judge a guard by its signs: it is late ``allowed_seconds`` and the bound after ``begin``."""
        guard = Guard(name, allowed_seconds=allowed_seconds)
        self._guards.append(guard)
        return guard

    def look(self, name: str, look: Callable[[], Limit | None], *, every_seconds: float) -> None:
        """Look again and again on a thread of its own, which starts after the first pause.

        A look returns the limit that is exceeded, and raises when it cannot tell; it counts as
        completed only when it returned. Most runs end before the first look and pay for none.
        """
        guard = self.add(name, allowed_seconds=every_seconds)
        guard.begin()

        def start() -> None:
            thread = threading.Thread(
                target=self._look_on, args=(guard, look, every_seconds), name=f"sandbox-{name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as exc:  # no more threads
                self.fail(name, exc)

        self._starts.append((time.monotonic() + every_seconds, start))
        self._timers.append(asyncio.get_running_loop().call_later(every_seconds, self._start_looks))

    def task(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run a guard that waits for something on the event loop; its failure ends the run."""

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
        logger.opt(exception=exc).error("sandbox.guard_failed guard={}", name)
        # The class alone: a message may name paths of the host, and words of the code's own choosing.
        self._end(Limit.GUARD, f"the run was ended because its guard {name!r} failed ({_name_of(exc)})")

    def judge(self, now: float) -> None:
        """End the run when a guard is late; begin looks that a busy event loop has not begun."""
        self._start_looks()
        for guard in list(self._guards):
            since = guard.since
            late = 0.0 if since is None else now - since - guard.allowed_seconds
            if late > self.bound_seconds and not self._closed.is_set() and self._alive():
                logger.error("sandbox.guard_stalled guard={} seconds={:.1f}", guard.name, late)
                self._end(
                    Limit.GUARD,
                    f"the run was ended because its guard {guard.name!r} gave no sign"
                    f" for {self.bound_seconds:g} s",
                )
                self.close()
                return

    def close(self) -> None:
        """Guard no more; a look that is under way ends by itself and its outcome is dropped.

        Safe from any thread, except that timers and tasks of the loop are left to ``stop``.
        """
        self._closed.set()
        _JUDGE.discard(self)

    def stop(self) -> None:
        """Close, on the event loop's thread, and cancel what waits there."""
        self.close()
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _start_looks(self) -> None:
        now = time.monotonic() + _CLOCK_SECONDS
        for entry in list(self._starts):
            # Removed first, by one of the two threads that may be here.
            if entry[0] <= now and not self._closed.is_set():
                try:
                    self._starts.remove(entry)
                except ValueError:
                    continue
                entry[1]()

    def _look_on(self, guard: Guard, look: Callable[[], Limit | None], every_seconds: float) -> None:
        failures, pause = 0, 0.0
        while not self._closed.wait(pause) and self._alive():
            begin = time.monotonic()
            try:
                limit = look()
            except UnsettledError:  # not completed: the judge says when that lasts too long
                pause = every_seconds
                continue
            except Exception as exc:
                failures += 1
                if self._closed.wait(_ENDING_SECONDS) or not self._alive():
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
            pause = min(max(every_seconds, cost / _LARGEST_SHARE), _LONGEST_PAUSE_SECONDS + every_seconds)
            guard.allowed_seconds = pause


class _Judge:
    """Judges the guards of all sandboxes of this process, on a thread that sleeps while there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._judged: set[Guards] = set()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, guards: Guards) -> None:
        """Judge from now on.

        Raises:
            RuntimeError: no thread can be started; without the judge nothing may run.
        """
        with self._lock:
            self._judged.add(guards)
            if self._thread is None or not self._thread.is_alive():  # also behind a fork
                self._thread = threading.Thread(target=self._judge_on, name="sandbox-judge", daemon=True)
                self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()

    def discard(self, guards: Guards) -> None:
        """Judge no more; harmless when called twice."""
        with self._lock:
            self._judged.discard(guards)

    def _judge_on(self) -> None:
        while True:
            self._wanted.wait()
            with self._lock:
                judged = list(self._judged)
                if not judged:
                    self._wanted.clear()
                    continue
            now = time.monotonic()
            for guards in judged:
                _judge_one(guards, now)
            time.sleep(min(guards.bound_seconds for guards in judged) / _JUDGEMENTS)


def _judge_one(guards: Guards, now: float) -> None:
    """Judge one sandbox; whatever fails must not leave the others without a judge."""
    try:
        guards.judge(now)
    except Exception:
        logger.exception("sandbox.judge_failed")


def _name_of(exc: BaseException) -> str:
    return type(exc).__name__


_JUDGE: Final = _Judge()
# The thread does not exist in a forked child, and the lock may be held there for good.
os.register_at_fork(after_in_child=_JUDGE.__init__)  # type: ignore[misc]
