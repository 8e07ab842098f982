"""Forks of this process: what code leaves here that they would share or lack, and whose children they become.

A fork has none of its parent's threads and timers. It shares its open files, sockets and shared memory, and
repeats the random numbers and ids that its parent has drawn. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final

from nekro.base.tasks import log_errors
from nekro_agent.durations import POLL_SECONDS

__all__ = [
    "ForkWatch",
    "adopt_orphans",
    "flush_streams",
    "run_in_fork",
    "show_command_line",
    "thread_count",
    "wait_until_orphaned",
]

_PR_SET_CHILD_SUBREAPER: Final = 36
#: Modules between the code that wants a random value and the functions that are watched.
_HELPERS: Final = frozenset({__name__, "os", "random", "secrets", "tempfile", "uuid"})
#: Writes the process id into each record.
_LOGGING: Final = "loguru"
#: Random state of a library that is seeded once per process, at its import.
_SEEDED_AT_IMPORT: Final = ("numpy.random",)
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: Checks per usual interval of a thread that has returned, or of a parent that exits.
_CHECKS: Final = 50


@dataclass(frozen=True, kw_only=True)
class _State:
    """What this process has."""

    descriptors: frozenset[tuple[int, str]]
    mappings: frozenset[str]
    handlers: tuple[object, ...]
    numbers: object
    seeded: frozenset[str]

    @classmethod
    def now(cls) -> _State:
        return cls(
            descriptors=frozenset(_descriptors()),
            mappings=frozenset(_shared_mappings()),
            handlers=tuple(map(signal.getsignal, sorted(signal.valid_signals()))),
            numbers=random.getstate(),
            seeded=frozenset(name for name in _SEEDED_AT_IMPORT if name in sys.modules),
        )


class ForkWatch:
    """Watches this process, which has one thread and no children, while it does something."""

    def __init__(self) -> None:
        self._drawn: list[str] = []
        self._stack = ExitStack()
        self._before = _State.now()

    def __enter__(self) -> ForkWatch:
        self._stack.enter_context(_watched(os, "getpid", self._drawn))
        self._stack.enter_context(_watched(os, "urandom", self._drawn))
        for name in ("getrandbits", "randbytes", "random"):
            self._stack.enter_context(_watched(random.SystemRandom, name, self._drawn))
        self._stack.enter_context(_watched(random.Random, "seed", self._drawn, counts=_is_unseeded))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def obstacles(self) -> list[str]:
        """Return what speaks against a fork, for people; empty if nothing does."""
        before, now = self._before, _State.now()
        opened = sorted(target for _, target in now.descriptors - before.descriptors)
        found = {
            "a thread": _has_threads(),
            "a child process": _has_children(),
            f"open files ({', '.join(opened)})": bool(opened) or before.descriptors != now.descriptors,
            "shared memory": before.mappings != now.mappings,
            "a signal handler": before.handlers != now.handlers,
            "a timer": any(map(any, map(signal.getitimer, _TIMERS))),
            "random numbers": before.numbers != now.numbers,
            "a random generator": before.seeded != now.seeded,
        }
        return [*(what for what, is_there in found.items() if is_there), *dict.fromkeys(self._drawn)]


def thread_count() -> int:
    """Return the number of this process's threads, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def adopt_orphans(does: bool) -> None:
    """Set whether a process below this one becomes its child when its own parent ends.

    Raises:
        OSError: the kernel does not do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "processes below this one cannot become its children")


def wait_until_orphaned(parent: int) -> None:
    """Wait for the end of this process's parent. Its files are closed before it ends, so they do not tell."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS / _CHECKS)


def flush_streams() -> None:
    """Write what is buffered, which each fork would write too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def run_in_fork(work: Callable[[], None]) -> bool:
    """Run work whose threads and connections this process must not have; returns whether it succeeded."""
    flush_streams()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log_errors("work_of_fork_failed"):
                work()
                code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def show_command_line(words: Sequence[str]) -> None:
    """Let this process be listed with a command line that is not the one of the process it is forked from.

    It is cut off at the length of that one.
    """
    # The kernel reads the command line from the memory of the process: fields 48 and 49 are its limits.
    fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode("utf-8", "replace")
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, min(len(text), end - start - 1))


def _has_children() -> bool:
    """Whether this process has children, including ended ones that it has not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_threads() -> bool:
    for _ in range(_CHECKS):
        if thread_count() == 1:
            return False
        time.sleep(POLL_SECONDS / _CHECKS)
    return True


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing
            continue


def _shared_mappings() -> Iterator[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            permissions = line.split(maxsplit=2)[1]
            if "w" in permissions and "s" in permissions:
                yield line


@contextmanager
def _watched(
    owner: Any, name: str, drawn: list[str], *, counts: Callable[..., bool] = lambda *_, **__: True
) -> Iterator[None]:
    """Note each use of a function by code other than the standard library's own."""
    function = getattr(owner, name)

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if counts(*args, **kwargs) and not _is_library(sys._getframe(1)):
            drawn.append(f"a value of `{name}`")
        return function(*args, **kwargs)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        setattr(owner, name, function)


def _is_unseeded(_: random.Random, value: object = None, *__: object) -> bool:
    return value is None


def _is_library(frame: Any) -> bool:
    """Whether the code that wants the value is part of the standard library or of the logger."""
    while frame is not None and frame.f_globals.get("__name__") in _HELPERS:
        frame = frame.f_back
    top = "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return top in sys.stdlib_module_names or top == _LOGGING
