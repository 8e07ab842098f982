"""Processes that a run leaves behind: this process adopts the orphans of its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: A server that may outlive a run; a restart makes it a child of this process.
_SERVERS = {"postgres"}
#: Seconds that processes may take to end after their parents.
_END_SECONDS = 10.0


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Become the parent of processes whose parents end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Command lines of the live processes below this one, by id; database servers are left out."""
    parents, words = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                name, state, parent = _stat(entry)
                parents[int(entry.name)] = parent
                if state != "Z" and name not in _SERVERS:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    words[int(entry.name)] = line.decode(errors="replace")[:200]
    return {pid: text for pid, text in words.items() if _is_below(pid, parents)}


def left_over(before: dict[int, str], *, seconds: float = _END_SECONDS) -> dict[int, str]:
    """Processes that did not exist before and do not end within some seconds."""
    end = time.monotonic() + seconds
    while left := {pid: text for pid, text in descendants().items() if pid not in before}:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    _reap(before)
    return left


def _reap(before: dict[int, str]) -> None:
    """Reap adopted processes that have ended."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) not in before and _stat(entry)[2] == os.getpid():
                os.waitpid(int(entry.name), os.WNOHANG)


def _stat(entry: Path) -> tuple[str, str, int]:
    head, _, tail = (entry / "stat").read_text().rpartition(")")
    state, parent = tail.split()[:2]
    return head.partition("(")[2], state, int(parent)


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False
