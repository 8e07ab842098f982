"""A `nekro` command at a pseudo terminal, as a person uses it."""

from __future__ import annotations

import os
import pty
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from forked_process import ForkedProcess
from waiting import WAIT_SECONDS, wait_until

__all__ = ["Terminal"]


class Terminal:
    """One command with the terminal as its standard streams; the terminal has 200 columns."""

    def __init__(self, arguments: Sequence[str], *, directory: Path, environment: Mapping[str, str]) -> None:
        self.shown = ""
        self._descriptor, theirs = pty.openpty()
        try:
            self._process = ForkedProcess(
                "nekro.cli.main",
                arguments,
                environ={**environment, "COLUMNS": "200", "LINES": "50"},
                stdin=theirs,
                stdout=theirs,
                cwd=directory,
            )
        finally:
            os.close(theirs)

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
        wait_until(lambda: self._read() is None, what=f"the end of the command; shown: {self.shown!r}")
        return self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        """End the command if it runs, and close the terminal."""
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        os.close(self._descriptor)

    def _read(self) -> str | None:
        """Read what is there; None at the end."""
        while wait([self._descriptor], 0.02):
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # its other end is closed
                return None
            if not data:
                return None
            self.shown += data.decode(errors="replace")
        return self.shown
