"""Commands of `nekro` as processes in one working directory, and a `nekro up` there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_process import ForkedCommand, run_forked
from nekro_inside import run_inside
from waiting import WAIT_SECONDS, wait_until

__all__ = ["NEKRO", "Done", "Shell", "open_shell", "running_up"]

NEKRO = [sys.executable, "-P", "-m", "nekro.cli.main"]


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The JSON document on stdout."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Shell:
    """Runs `nekro` with one environment, in one empty working directory."""

    directory: Path
    environment: dict[str, str]

    def __call__(self, *arguments: str, given: str = "", **settings: str) -> Done:
        environ = {**self.environment, **settings}
        done = run_forked("nekro.cli.main", *arguments, environ=environ, cwd=self.directory, given=given)
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str, has_stdin: bool = False, **settings: str) -> ForkedCommand:
        """Start a command, with pipes."""
        environ = {**self.environment, **settings}
        return ForkedCommand(
            "nekro.cli.main", arguments, environ=environ, cwd=self.directory, has_stdin=has_stdin
        )

    def inside(self, *arguments: str, **settings: str) -> Done:
        """Run a command in this process, which saves the imports; for commands that are expected to fail."""
        environment = {**self.environment, **settings}
        return Done(*run_inside(*arguments, directory=self.directory, environment=environment))

    @property
    def data_dir(self) -> Path:
        return self.directory / "data"


@contextlib.contextmanager
def open_shell(plugins: Mapping[str, str], **settings: str) -> Iterator[Shell]:
    """A shell with plugin files, and no settings but those given."""
    # Not pytest's directory: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="nkcli") as name:
        directory = Path(name)
        (directory / "plugins").mkdir()
        for file, source in plugins.items():
            (directory / "plugins" / file).write_text(source, "utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NEKRO_")}
        yield Shell(directory, {**clean, "NEKRO_PLUGINS__DIRS": str(directory / "plugins"), **settings})


@contextlib.contextmanager
def running_up(shell: Shell) -> Iterator[ForkedCommand]:
    """A running `nekro up` on the shell's data directory, without a gateway.

    It is stopped by Ctrl-C unless it has ended.
    """
    process = shell.start("up", "--gateway-port", "0")
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready:"):
                ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: ready.is_set() or process.poll() is not None, what="nekro up")
        assert process.poll() is None, "".join(lines)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(WAIT_SECONDS)
        reader.join(WAIT_SECONDS)
        process.communicate()
