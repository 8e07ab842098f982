"""Python processes that start fast: forked from a server that has imported what workers import.

The server is the standard library's, one per run of tests, or started at the first use. A forked process runs
what ``python -m MODULE ARGUMENTS`` runs; tests of an interpreter's start, flags or search path start one
with `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from multiprocessing import forkserver, reduction
from pathlib import Path
from tempfile import TemporaryFile
from termios import TIOCSCTTY
from typing import IO, Any, Self

from forked_children import fork_children
from waiting import WAIT_SECONDS

import nekro.cli.commands

_CONTEXT = multiprocessing.get_context("forkserver")
# Imports of running workers and commands, except for plugins and their main module.
_CONTEXT.set_forkserver_preload(
    [
        "alembic.command",
        "nekro.broker.celery.consumer",
        "nekro.broker.celery.remote_control",
        "celery.app.control",
        "celery.app.log",
        "celery.apps.worker",
        "celery.bin.worker",
        "celery.concurrency.prefork",
        "celery.events",
        "celery.fixups.django",
        "celery.worker.autoscale",
        "celery.worker.consumer.delayed_delivery",
        "celery.worker.strategy",
        *(
            f"nekro.cli.commands.{module.name}"
            for module in pkgutil.iter_modules(nekro.cli.commands.__path__)
        ),
        "nekro.cli.running",
        "nekro.cli.services.system",
        "encodings.idna",
        "nekro.gateway.app",
        "nekro.gateway.web.server",
        "httpx",
        "nekro_agent.testing",
        "psycopg",
        "pytest",  # of this module, which the process imports
        "rich.progress",
        "rich.table",
        "nekro.sandbox.manager",
        "sqlalchemy.dialects.postgresql",
        "sqlalchemy.dialects.sqlite",
        "storage.migrate",
        "workers.pools.asyncio_pool",
        "nekro.app.services",
        "workers.ops.monitor",
        "workers.process",
        "workers.rounds_service",
        "workers.services",
        "workers.pools.thread_pool",
    ]
)


def start_server() -> None:
    """Start the server, for this process and those that it forks: each would import all again."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    # In a forked process it would look for the server among its own children, and start another.
    server.ensure_running = lambda: None


#: Commands that start no other.
_WITHOUT_CHILDREN = (["worker"], ["gateway"])
_STARTED: list[ForkedProcess] = []


@atexit.register
def _kill_what_is_left() -> None:
    """Runs before `multiprocessing` waits for the server: a failed test may have left a worker."""
    for process in _STARTED:
        process.kill()


class Descriptor:
    """A file descriptor to pass on; as an argument it becomes its number in the process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(passed: Any) -> Descriptor:
    return Descriptor(passed.detach())


class ForkedProcess:
    """One process in a session of its own; implements the part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str | Descriptor],
        *,
        environ: Mapping[str, str],
        stdout: int,
        stderr: int | None = None,
        stdin: int | None = None,
        cwd: Path | None = None,
        umask: int | None = None,
    ) -> None:
        """Run a module.

        Args:
            stdout: descriptor of its standard output; the process gets a copy.
            stderr: None means that of ``stdout``.
            stdin: None means ``/dev/null``.
            cwd: None means the directory of this process.
            umask: None means that of the first use of this class.
        """
        streams = [None if stdin is None else Descriptor(stdin), Descriptor(stdout)]
        streams.append(Descriptor(stdout if stderr is None else stderr))
        target = (module, list(arguments), dict(environ), streams, cwd or Path.cwd(), umask)
        self._process = _CONTEXT.Process(target=_run, args=target, daemon=False)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        _STARTED[:] = [*(process for process in _STARTED if process.poll() is None), self]

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code, or raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; a no-op after the end."""
        with suppress(ProcessLookupError):  # it has ended, and its exit code is about to arrive
            if self.returncode is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedCommand(ForkedProcess):
    """A process with text pipes as its output, which tests use as `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str | Descriptor],
        *,
        environ: Mapping[str, str],
        has_stdin: bool = False,
        stderr: int | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Run a module.

        Args:
            has_stdin: standard input is a pipe too; otherwise it is ``/dev/null``.
            stderr: descriptor to use instead of a pipe, of which the process gets a copy.
        """
        self.stdin: IO[str] | None = None
        self.stderr: IO[str] | None = None
        ours, theirs = os.pipe()
        given = [theirs]
        self.stdout: IO[str] = open(ours, encoding="utf-8")  # noqa: SIM115 - closed with the process
        stdin = None
        if has_stdin:
            stdin, ours = os.pipe()
            given.append(stdin)
            self.stdin = open(ours, "w", encoding="utf-8")  # noqa: SIM115 - closed with the process
        if stderr is None:
            ours, stderr = os.pipe()
            given.append(stderr)
            self.stderr = open(ours, encoding="utf-8")  # noqa: SIM115 - closed with the process
        try:
            super().__init__(
                module, arguments, environ=environ, stdin=stdin, stdout=theirs, stderr=stderr, cwd=cwd
            )
        finally:
            for number in given:
                os.close(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close standard input, read the rest of the output, and wait for the end.

        Raises:
            subprocess.TimeoutExpired: the process, or one that has its pipes, still runs.
        """
        if self.stdin is not None:
            self.stdin.close()
        threads = ThreadPoolExecutor(2)
        try:
            reads = [threads.submit(_rest, pipe) for pipe in (self.stdout, self.stderr)]
            out, err = (read.result(timeout) for read in reads)
        except FutureTimeoutError:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0) from None
        finally:
            threads.shutdown(wait=False)
        self.wait(timeout)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


def _rest(pipe: IO[str] | None) -> str:
    if pipe is None or pipe.closed:
        return ""
    with pipe:
        return pipe.read()


def run_forked(
    module: str,
    *arguments: str,
    environ: Mapping[str, str],
    cwd: Path | None = None,
    given: str = "",
    seconds: float = WAIT_SECONDS,
    umask: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a module to its end with ``given`` on standard input, as `subprocess.run` with captured output."""
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given.encode())
        stdin.seek(0)
        process = ForkedProcess(
            module,
            arguments,
            environ=environ,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            cwd=cwd,
            umask=umask,
        )
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            written = [_content(stdout), _content(stderr)]
        return subprocess.CompletedProcess(arguments, code, *written)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _run(
    module: str,
    arguments: list[str | Descriptor],
    environ: dict[str, str],
    streams: list[Descriptor | None],
    cwd: Path,
    umask: int | None,
) -> None:
    os.setsid()
    if umask is not None:
        os.umask(umask)
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        passed = os.open(os.devnull, os.O_RDONLY) if stream is None else stream.number
        os.dup2(passed, number)
        os.close(passed)
    if os.isatty(0):
        ioctl(0, TIOCSCTTY, 0)  # as in a login: it sends the signals of Ctrl-C and of its end
    written = [str(a.number) if isinstance(a, Descriptor) else a for a in arguments]
    run_command(module, written, environ)


def run_command(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a module in this forked process, as the interpreter would; `nekro` forks its own processes."""
    # `benchmarks.harness.limited` is `nekro` with limits before the arguments, which its processes have too.
    limits = [*arguments[:1]] if module == "benchmarks.harness.limited" else []
    has_children = list(arguments[len(limits) :][:1]) not in _WITHOUT_CHILDREN
    if has_children and (limits or module == "nekro.cli.main"):
        fork_children(partial(_run_command, module, limits))
    _run_module(module, arguments, environ)


def _run_command(
    module: str, limits: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str]
) -> None:
    _run_module(module, [*limits, *arguments], environ)


def _run_module(module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    # As an interpreter opens them: line-buffered at a terminal.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - open as long as the process
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
