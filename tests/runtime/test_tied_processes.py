"""What a process starts ends with it, also when it is killed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from test_layers import PACKAGES
from waiting import WAIT_SECONDS, wait_until

from nekro_agent.execution.tied_process import tied_to_this_process

ROOT = Path(__file__).parents[2]

#: Starts a program on a thread that ends at once; the program starts another one and ignores SIGTERM.
PARENT: Final = """
import subprocess, sys, threading
from nekro_agent.execution.tied_process import tied_to_this_process

program = '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(os.getpid(), below.pid, flush=True)
time.sleep(600)
'''
started = []
def start():
    command = tied_to_this_process(sys.executable, "-c", program, end_seconds=0.1)
    started.append(subprocess.Popen(command, start_new_session=True))
thread = threading.Thread(target=start)
thread.start()
thread.join()
started[0].wait()
"""
STARTS: Final = frozenset(
    {f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")}
    | {f"asyncio.create_subprocess_{kind}" for kind in ("exec", "shell")}
)
#: Starts of processes without a tie: where, and why each ends with its parent all the same.
ENDS_OTHERWISE: Final = {
    ("nekro/agent/pictures/decoder.py", "_run"): "the program asks the kernel for a signal",
    ("broker_config/embedded.py", "_version"): "it prints its version",
    ("nekro/cli/services/process.py", "start"): "it watches the socket of its parent",
    (
        "nekro/sandbox/images.py",
        "_run",
    ): "it changes a file system, which must not be cut, and ends by itself",
    ("nekro/sandbox/drivers/isolated.py", "_ask"): "it prints its version",
    ("nekro/sandbox/drivers/container.py", "_ask"): "it answers and ends",
    ("nekro/sandbox/drivers/container.py", "_start"): "the container watches the socket of its parent",
    (
        "nekro/sandbox/drivers/process.py",
        "start_printing",
    ): "bubblewrap and the runner ask the kernel for a signal",
    ("nekro/sandbox/interpreter.py", "_ask"): "it answers one question",
    (
        "nekro/sandbox/programs.py",
        "_run",
    ): "bubblewrap asks the kernel for a signal; without it the caller ties it",
}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_tied_program_and_what_it_started_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids), "the end of the thread ended them"
        parent.kill()
        parent.wait(WAIT_SECONDS)
        wait_until(lambda: not any(is_running(pid) for pid in pids), what="the programs to end")


@pytest.mark.parametrize(
    ("program", "code"),
    [("import sys; print(sys.stdin.read()); sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
    ids=["exits", "is killed"],
)
def test_a_tied_program_has_its_streams_and_its_exit_code(program: str, code: int) -> None:
    command = tied_to_this_process(sys.executable, "-c", program)
    done = subprocess.run(
        command, input="words", capture_output=True, text=True, start_new_session=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == code
    assert done.stdout == ("words\n" if code == 3 else "")


def test_a_program_that_does_not_exist_is_named() -> None:
    command = tied_to_this_process("/nowhere/program")
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stderr) == (127, "/nowhere/program: No such file or directory\n")


def test_a_stopped_program_stays_tied() -> None:
    command = tied_to_this_process("sleep", "600")
    with subprocess.Popen(command, start_new_session=True) as tie:
        children = Path(f"/proc/{tie.pid}/task/{tie.pid}/children")
        (program,) = wait_until(lambda: children.read_text().split(), what="the program to start")
        os.kill(int(program), signal.SIGSTOP)
        stat = Path(f"/proc/{program}/stat")
        wait_until(lambda: stat.read_text().split()[2] == "T", what="the program to stop")
        assert tie.poll() is None
        os.killpg(tie.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(int(program)), what="the program to end")


def _starts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield, for each start of a process in a module, its function and whether that ties what it starts."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            for _ in called & STARTS:
                yield function.name, bool(called & {"tied_to_this_process", "tied_to_lock"})


@pytest.mark.one_python
def test_every_process_that_the_product_starts_ends_with_its_parent() -> None:
    untied = {
        (path.relative_to(ROOT).as_posix(), function)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function, is_tied in _starts(path)
        if not is_tied
    }
    assert untied == set(ENDS_OTHERWISE)
