"""A program at a pseudo terminal, as a person uses it."""

from __future__ import annotations

import os
import pty
import select
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import wait_until

__all__ = ["Terminal"]


class Terminal:
    """One program with the terminal as its standard streams; the terminal has 200 columns."""

    def __init__(self, command: Sequence[str], *, directory: Path, environment: Mapping[str, str]) -> None:
        self.shown = ""
        self._code: int | None = None
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            os.execve(command[0], list(command), {**environment, "COLUMNS": "200", "LINES": "50"})

    def type(self, text: str) -> None:
        """Type text; ``\\x03`` is Ctrl-C, ``\\x04`` Ctrl-D, ``\\r`` the Enter key."""
        os.write(self._descriptor, text.encode())

    def until(self, words: str) -> str:
        """Wait until the words are shown; returns everything up to and with them, which is then forgotten."""
        wait_until(lambda: self._read() is None or words in self.shown, what=f"{words!r} in {self.shown!r}")
        end = self.shown.index(words) + len(words)
        found, self.shown = self.shown[:end], self.shown[end:]
        return found

    def ended(self) -> int:
        """Wait for the end; returns the exit code."""
        while self._code is None:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._read()
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def close(self) -> None:
        """End the program if it runs, and close the terminal."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)

    def _read(self) -> str | None:
        """Read what is there; None at the end."""
        while select.select([self._descriptor], [], [], 0.02)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # its other end is closed
                return None
            if not data:
                return None
            self.shown += data.decode(errors="replace")
        return self.shown
