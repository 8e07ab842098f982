"""Ties a program to what it is started for: it ends when that has ended, however that happened.

A process that is killed with SIGKILL cannot stop the programs that it has started. So a small process stands
between: this file, run as a script. It starts the program in its process group and waits, for the program or
for what it is tied to. The parent-death signal of the kernel would not do: it follows the thread that
started the program, and does not reach what the program starts.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["tied_to_lock", "tied_to_this_process"]

_PR_SET_PDEATHSIG = 1


def tied_to_this_process(*command: str, end_seconds: float = 4.0) -> list[str]:
    """Return a command that runs ``command``, and ends all that it has started when this process has ended.

    Start it with ``start_new_session=True``; its process id is then that of the group.

    Args:
        end_seconds: time between SIGTERM and SIGKILL.
    """
    return _command("process", str(os.getpid()), end_seconds, command)


def tied_to_lock(path: Path, command: Sequence[str], *, end_seconds: float) -> list[str]:
    """Return a command that runs ``command``, and ends it when no process holds the lock of a file.

    While it ends the program, it holds the lock exclusively.

    Args:
        path: the file; holders have a shared lock (``flock``) before it is started.
        end_seconds: time between SIGTERM and SIGKILL.
    """
    return _command("lock", str(path), end_seconds, command)


def _command(kind: str, name: str, end_seconds: float, command: Sequence[str]) -> list[str]:
    # Without site-packages, so that it starts fast.
    return [sys.executable, "-I", "-S", __file__, kind, name, str(end_seconds), *command]


def _main() -> None:
    kind, name, seconds, *command = sys.argv[1:]
    if os.getsid(0) != os.getpid():
        os.setsid()  # the whole group is ended, which must not be that of a terminal's job
    read = os.open(name, os.O_RDONLY) if kind == "lock" else os.pidfd_open(int(name))
    if kind == "process" and os.getppid() != int(name):
        return  # it has ended already
    signal.signal(signal.SIGCHLD, _end_with_program)
    program = os.fork()
    if program == 0:
        _become(command)
    if kind == "lock":
        fcntl.flock(read, fcntl.LOCK_EX)
    else:
        poll = select.poll()
        poll.register(read, select.POLLIN)
        poll.poll()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    os.kill(program, signal.SIGCONT)
    time.sleep(float(seconds))
    os.killpg(0, signal.SIGKILL)


def _become(command: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - as our caller has chosen it
    except OSError as exc:
        os.write(2, f"{command[0]}: {exc.strerror}\n".encode())
        os._exit(127)


def _end_with_program(number: int, frame: object) -> None:
    """Exit as the program did, unless it was only stopped."""
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _main()
