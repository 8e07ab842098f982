"""Runs the tests in several processes that are forked after one collection: ``--processes N``.

Collection imports the product and all test modules: 9 s of processor time, and 21 s where no bytecode is
cached yet. Forked processes share what it made; processes that each collect would repeat it. A process takes
one file after another, so that the tests of a file share their servers and fleets.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest
from _pytest.capture import FDCapture

#: Processes that may die. More end the run, as each may have hung up to its time limit.
MOST_DEATHS = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the number of processes."""
    parser.addoption(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="run files in N processes forked after collection",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in processes; None leaves them to pytest."""
    config = session.config
    if config.option.processes < 2 or config.option.collectonly or session.testsfailed:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one for all processes
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.showfspath = False  # the results of several files mix
    if "forked_process" in sys.modules:  # imported by tests
        sys.modules["forked_process"].start_server()
    run = _Run(session)
    try:
        run.to_the_end()
    finally:
        run.stop()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _Process:
    """A forked process, and the tests that it has yet to end."""

    def __init__(self, session: pytest.Session, others: list[_Process]) -> None:
        self.connection, theirs = Pipe()
        self.pending: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for connection in (self.connection, *(other.connection for other in others)):
                connection.close()
            _run_files(session, theirs)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What it has sent."""
        with suppress(EOFError, ConnectionResetError):
            while self.connection.poll():
                yield self.connection.recv()

    def close(self) -> int:
        """Wait for the end; returns the exit code, negative for a signal."""
        self.connection.close()
        os.close(self.ended)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Run:
    """Gives files to processes and passes their reports to the plugins of this one."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        numbered = groupby(range(len(session.items)), lambda number: session.items[number].path)
        self.files = deque(list(numbers) for _, numbers in numbered)
        self.deaths = 0
        self.processes: list[_Process] = []
        for _ in range(min(session.config.option.processes, len(self.files))):
            self._start()

    def _start(self) -> None:
        self.processes.append(_Process(self.session, self.processes))

    def to_the_end(self) -> None:
        """Return when each process has ended."""
        while self.processes:
            connections = {process.connection: process for process in self.processes}
            ends = {process.ended: process for process in self.processes}
            ready = wait([*connections, *ends])
            for process in [connections[one] for one in ready if isinstance(one, Connection)]:
                self._receive(process)
            # What they sent last has been received above, or is received now.
            for process in [ends[one] for one in ready if isinstance(one, int)]:
                self._receive(process)
                self.processes.remove(process)
                self._account_for(process, process.close())

    def stop(self) -> None:
        """End what still runs, after an interruption of this process."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGINT)
        for process in self.processes:
            process.close()

    def _receive(self, process: _Process) -> None:
        config = self.session.config
        for kind, *values in process.messages():
            if kind == "report":
                data = values[0]
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
            elif kind == "ended":
                number, location = values
                process.pending.remove(number)
                nodeid = self.session.items[number].nodeid
                config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
            elif kind == "warning":
                config.hook.pytest_warning_recorded.call_historic(kwargs=values[0])
            else:
                is_over = self.session.shouldfail or self.session.shouldstop
                given = self.files.popleft() if self.files and not is_over else []
                process.pending += given
                with suppress(BrokenPipeError):  # its end is seen next
                    process.connection.send(given)

    def _account_for(self, process: _Process, code: int) -> None:
        """Report a process that died, and run the rest of its file in another one."""
        if code == 0 and not process.pending:
            return
        config = self.session.config
        self.deaths += 1
        if process.pending:
            died, *rest = process.pending
            item = self.session.items[died]
            text = f"its process ended with {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            config.hook.pytest_runtest_logreport(report=report)
            if rest:
                self.files.appendleft(rest)
        if self.deaths > MOST_DEATHS:
            self.session.shouldstop = f"{self.deaths} test processes died"
        elif self.files:
            self._start()


class _Reporter:
    """Sends the results of this process's tests."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(self, **values: Any) -> None:
        self._connection.send(("warning", values))


def _run_files(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run the given files, in a forked process."""
    code = 1
    config = session.config
    try:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)
        config.pluginmanager.register(_Reporter(config, connection))
        _own_captured_output(config)
        numbers = _numbers(connection)
        number = next(numbers, None)
        while number is not None:
            following = next(numbers, None)
            item = session.items[number]
            nextitem = None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            connection.send(("ended", number, item.location))
            number = following
        code = 0
    except KeyboardInterrupt:
        pass
    except (BrokenPipeError, EOFError):
        pass  # the process that collects reports has ended
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
        with suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


def _own_captured_output(config: pytest.Config) -> None:
    """Let the streams of the collection, which imported modules may keep, write to files of this process."""
    capturing = config.pluginmanager.getplugin("capturemanager")._global_capturing
    for stream in (capturing.out, capturing.err):
        if isinstance(stream, FDCapture):
            with TemporaryFile() as own:
                os.dup2(own.fileno(), stream.tmpfile.fileno(), inheritable=False)


def _numbers(connection: Connection) -> Iterator[int]:
    """The tests to run; the next file is asked for when the last test of one begins."""
    while True:
        connection.send(("next",))
        given = connection.recv()
        if not given:
            return
        yield from given
