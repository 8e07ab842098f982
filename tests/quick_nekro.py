"""A `nekro` for shells whose processes are forked from one that has imported what they import.

The file on PATH is a small client. It passes its arguments, environment, directory and standard streams to
a server, which forks; then it passes signals on, and ends as that process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

_REQUEST_BYTES = 1 << 20
#: Needs no import that takes long. The socket's path replaces ``SOCKET``.
_CLIENT = """#!{python} -IS
import os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
words = [os.getcwd(), str(len(sys.argv) - 1), *sys.argv[1:]]
words += [name + "=" + value for name, value in os.environ.items()]
numbers = {{signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1}}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
socket.send_fds(server, [os.fsencode("\\0".join(words))], [0, 1, 2])
process = int(server.recv(64))
for number in numbers:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
status = int(server.recv(64) or 9)
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


@contextlib.contextmanager
def quick_nekro(directory: Path) -> Iterator[Path]:
    """Serve ``directory / "nekro"``, a short path, until the end; yields it."""
    from forked_process import ForkedProcess

    path, command = directory / "nekro.sock", directory / "nekro"
    command.write_text(_CLIENT.format(python=sys.executable, path=str(path)), "utf-8")
    command.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(64)
        from forked_process import Descriptor

        with open(os.devnull, "wb") as nothing:
            server = ForkedProcess(
                "quick_nekro", [Descriptor(listener.fileno())], environ=os.environ, stdout=nothing.fileno()
            )
    try:
        yield command
    finally:
        server.terminate()
        server.wait()


def _serve(listener: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _handle(client)
        client.close()


def _handle(client: socket.socket) -> NoReturn:
    """Fork for a client, tell it the process and its end; a client that is gone ends the process."""
    data, streams, _, _ = socket.recv_fds(client, _REQUEST_BYTES, 3)
    child = os.fork()
    if child == 0:
        client.close()
        _become(data, streams)
    for stream in streams:
        os.close(stream)
    client.send(str(child).encode())
    ended = os.pidfd_open(child)
    ready = wait([ended, client])
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        client.send(str(status).encode())
    os._exit(0)


def _become(data: bytes, streams: list[int]) -> NoReturn:
    from forked_children import run_to_the_end
    from forked_process import run_command

    directory, count, *words = os.fsdecode(data).split("\0")
    environ = dict(word.split("=", 1) for word in words[int(count) :])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(directory)
    run_to_the_end(lambda: run_command("nekro.cli.main", words[: int(count)], environ))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
