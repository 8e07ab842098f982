"""A process imports the plugins that its forks can share, and no others, whatever these do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from loaded_plugins import end_patience_with
from waiting import WAIT_SECONDS, wait_until

from nekro.base.forks import thread_count
from nekro.plugins.import_trials import Trials
from nekro.plugins.loader import load_plugins, plugin_steps, prepare_imports

PLUGIN = """
with open({journal!r}, "a") as file:
    file.write("{name}\\n")

from nekro_agent.api.plugin import NekroPlugin

{code}

plugin = NekroPlugin("n", "{name}", "d", "1", "Ada", "u")
"""
OWN = {
    "a thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a socket": "import socket; kept = socket.socket()",
    "a process": "import subprocess; kept = subprocess.Popen(['sleep', '600'])",
    "a database": "import sqlite3; kept = sqlite3.connect(__file__)",
    "an event loop": "import asyncio; kept = asyncio.get_event_loop()",
    "a scheduled coroutine": "import asyncio; asyncio.get_event_loop().call_soon(print)",
    "a drawn id": "import uuid; kept = uuid.uuid4()",
    "a process id": "import os; kept = os.getpid()",
    "a generator": "import random; kept = random.Random()",
    "a temporary folder": "import tempfile; kept = tempfile.TemporaryDirectory()",
    "a signal handler": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "an error": "raise RuntimeError('no')",
    "a kill from outside": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
REFUSED = {
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "an exit": ("import os; os._exit(3)", "exit code 3"),
    "an exit without error": ("import os; os._exit(0)", "exit code 0"),
}


@dataclass(frozen=True)
class Outcome:
    """What was imported, by name of the plugin, and how often."""

    errors: dict[str, str | None]
    slow: set[str]
    imports: dict[str, int]
    #: As a worker lists them, which takes what was imported.
    statuses: dict[str, str]


class Folder:
    """A folder of plugins, each with one line of code, in the order of their names."""

    def __init__(self, path: Path) -> None:
        self.path, self.journal = path / "plugins", path / "journal"
        self.path.mkdir()

    def add(self, name: str, code: str = "") -> None:
        source = PLUGIN.format(journal=str(self.journal), name=name, code=code)
        (self.path / f"{name}.py").write_text(source, "utf-8")

    def run(self, *, loads: bool = True, on_progress: Callable[[str], None] = lambda _: None) -> Outcome:
        """Try the plugins in a process with one thread; the last of its forks answers."""
        learn, tell = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(tell, loads, on_progress)
        )
        process.start()
        tell.close()
        try:
            assert learn.poll(WAIT_SECONDS)
            outcome: Outcome = learn.recv()
            return outcome
        finally:
            learn.close()
            process.join(WAIT_SECONDS)

    def _run(self, tell: Connection, loads: bool, on_progress: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair()
        prepare_imports(data_dir=self.path.parent, packages=None, core=None)
        steps = tuple(plugin_steps([self.path], shipped=False, entry_points=False))
        trials = Trials(steps, WAIT_SECONDS, (theirs,), on_progress)
        trials.run()
        assert thread_count() == 1
        prepared = trials.prepared
        names = {step.text: step.name for step in steps}
        statuses = {}
        if loads:
            loaded = load_plugins(
                [self.path],
                data_dir=self.path.parent,
                patience_seconds=WAIT_SECONDS,
                prepared=prepared,
            )
            statuses = {Path(record.path).stem: str(record.status) for record in loaded.records}
        lines = self.journal.read_text().split()
        outcome = Outcome(
            errors={names[text]: one.error for text, one in prepared.imported.items()},
            slow={names[text] for text in prepared.slow},
            imports={name: lines.count(name) for name in names.values()},
            statuses=statuses,
        )
        tell.send(outcome)
        ours.close()
        os._exit(0)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_plain_plugins_are_imported_once(folder: Folder) -> None:
    for name in "abc":
        folder.add(name)
    outcome = folder.run()
    assert outcome.errors == {"a": None, "b": None, "c": None}
    assert outcome.imports == {"a": 1, "b": 1, "c": 1}
    assert outcome.statuses == {"a": "ok", "b": "ok", "c": "ok"}


class Garbage:
    """An open file that only the garbage collector closes."""

    def __init__(self) -> None:
        self.me, self.file = self, os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.file)


def test_garbage_of_the_process_speaks_against_no_plugin(folder: Folder) -> None:
    folder.add("a", "import gc; gc.collect()")
    gc.disable()
    try:
        Garbage()
        assert folder.run().errors == {"a": None}
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", OWN)
def test_a_plugin_whose_import_cannot_be_shared_is_left_to_each_worker(folder: Folder, kind: str) -> None:
    folder.add("a")
    folder.add("b", OWN[kind])
    folder.add("c")
    outcome = folder.run(loads=kind != "a kill from outside")
    assert outcome.errors == {"a": None, "c": None}
    if outcome.statuses:
        status = "failed" if kind == "an error" else "ok"
        assert outcome.statuses == {"a": "ok", "b": status, "c": "ok"}
        assert outcome.imports["b"] >= 2


@pytest.mark.parametrize("kind", REFUSED)
def test_a_plugin_that_ends_the_process_fails_and_no_other(folder: Folder, kind: str) -> None:
    code, how = REFUSED[kind]
    folder.add("a")
    folder.add("b", code)
    folder.add("c")
    outcome = folder.run()
    assert outcome.errors == {"a": None, "b": f"its import ended the process with {how}", "c": None}
    assert outcome.imports["b"] == 1
    assert outcome.statuses == {"a": "ok", "b": "failed", "c": "ok"}


def test_a_plugin_that_hangs_is_starting_and_delays_no_other(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("a")
    folder.add("b", "import time; time.sleep(600)")
    folder.add("c")
    outcome = folder.run(on_progress=end_patience_with(monkeypatch, "b"))
    assert outcome.errors == {"a": None, "c": None}
    assert outcome.slow == {"b"}
    assert outcome.statuses == {"a": "ok", "b": "starting", "c": "ok"}


def test_imports_of_a_long_trial_are_not_undone(folder: Folder) -> None:
    """The processor time of an import that is undone is bounded, so a fork is taken in between."""
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    folder.add("a", burn)
    folder.add("b", OWN["a socket"])
    folder.add("c")
    outcome = folder.run()
    assert outcome.imports == {"a": 1, "b": 2, "c": 1}


def test_processes_that_an_import_started_end_with_its_trial(folder: Folder, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = "import subprocess; kept = subprocess.Popen(['sleep', '600'])\n"
    code += f"with open({str(pid)!r}, 'w') as file: file.write(str(kept.pid))"
    folder.add("a", code)
    folder.run(loads=False)
    wait_until(lambda: not is_running(int(pid.read_text())), what="the end of the process")


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
