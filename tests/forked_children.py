"""Forks the `nekro` processes that a forked command starts, instead of starting interpreters.

`nekro up` and commands with services of their own start workers as interpreters, each of which imports for
a second. In a forked command they are forked from a process that was itself forked before the command ran:
it has imported what they import, and has neither threads nor connections. The command is the parent of its
workers as ever: it reaps them, and process ids, signals and exit codes are theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

__all__ = ["fork_children", "run_to_the_end"]

#: Beginning of the command lines that are forked.
_OURS = [sys.executable, "-P", "-m", "nekro.cli.main"]
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 1 << 20
_MOST_DESCRIPTORS = 32
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
#: Ctrl-C and stops are for the command.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)


def fork_children(run: Callable[[Sequence[str], dict[str, str]], None]) -> None:
    """Let `subprocess` fork `nekro` commands from now on; for a process that has no threads yet.

    Args:
        run: runs `nekro` with arguments and an environment, in a process with its descriptors and directory.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, command, run)
    theirs.close()
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(start)

    def execute(process: Any, *values: Any) -> None:
        call = signature.bind(process, *values).arguments
        if list(call["args"])[:4] != _OURS:
            start(process, *values)
            return
        process.pid = _request(ours, call)
        process._child_created = True
        process._close_pipe_fds(*(call[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _request(server: socket.socket, call: dict[str, Any]) -> int:
    """Have a process forked that becomes our child; returns its id."""
    streams = [call[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    passed = sorted(call["pass_fds"])
    request = {
        "arguments": list(call["args"])[4:],
        "environ": dict(os.environ if call["env"] is None else call["env"]),
        "directory": os.fspath(call["cwd"] or os.getcwd()),
        "has_session": bool(call["start_new_session"]),
        "numbers": [0, 1, 2, *passed],
    }
    _adopt_orphans(True)
    try:
        given = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        socket.send_fds(server, [json.dumps(request).encode()], [*given, *passed])
        return int(server.recv(64))
    finally:
        _adopt_orphans(False)


def _adopt_orphans(does: bool) -> None:
    """Set whether a process below this one becomes its child when its own parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")


def _serve(
    requests: socket.socket, command: int, run: Callable[[Sequence[str], dict[str, str]], None]
) -> NoReturn:
    """Fork for the command until it has ended."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the command's own pipes close when it ends
        os.dup2(nothing, stream)
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            os._exit(0)
        learn, tell = os.pipe()
        begin, end = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                os.close(end)
                os.read(begin, 1)  # until this process is a child of the command
                if os.getppid() == command:
                    _become(json.loads(data), descriptors, run)
                os._exit(1)
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        child_id = os.read(learn, 64)
        for descriptor in (learn, tell, begin, end, *descriptors):
            os.close(descriptor)
        requests.send(child_id)


def _become(
    request: dict[str, Any], descriptors: list[int], run: Callable[[Sequence[str], dict[str, str]], None]
) -> NoReturn:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["has_session"]:
        os.setsid()
    numbers = request["numbers"]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for number, descriptor in zip(numbers, above, strict=True):
        os.dup2(descriptor, number)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in numbers:
            with contextlib.suppress(OSError):  # of the descriptor of the listing
                os.close(int(entry))
    os.chdir(request["directory"])
    with open("/proc/self/comm", "w") as name:  # its command line is that of its origin
        name.write(request["arguments"][0][:15])
    run_to_the_end(partial(run, request["arguments"], request["environ"]))


def run_to_the_end(run: Callable[[], None]) -> NoReturn:
    """Run, and end this process as an interpreter ends."""
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as exc:
        code = 0 if exc.code is None else exc.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
