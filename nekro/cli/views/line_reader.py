"""Reads lines from a person: with editing, a history and completion of file names at a terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

from nekro.cli.output import Output
from nekro_agent.files.private_files import make_directory, open_private

__all__ = ["LineReader"]

_PROMPT: Final = "> "
#: Lines that are kept.
_HISTORY_LINES: Final = 1000


class LineReader:
    """Reads standard input line by line."""

    def __init__(self, output: Output, history: Path) -> None:
        """Create the reader; ``history`` is the private file that keeps lines over runs."""
        self._output = output
        self._history = history
        #: Python edits lines only if both are terminals.
        self._edits = sys.stdin.isatty() and output.is_terminal and self._has_readline()

    def read(self) -> str | None:
        """Return the next line without its end; None at the end of the input."""
        if self._edits:
            try:
                return input(_PROMPT)
            except EOFError:
                self._output.words("")
                return None
        if sys.stdin.isatty():
            self._output.stderr.write(_PROMPT)
            self._output.stderr.flush()
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def close(self) -> None:
        """Store the history."""
        if not self._edits:
            return
        import readline

        with contextlib.suppress(OSError):  # a chat does not fail for its history
            make_directory(self._history.parent)
            open_private(self._history, "a").close()
            readline.set_history_length(_HISTORY_LINES)
            readline.write_history_file(self._history)

    def _has_readline(self) -> bool:
        try:
            import readline
        except ImportError:  # a Python without the library
            return False
        readline.clear_history()
        readline.parse_and_bind("tab: complete")  # the names of files
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        return True
