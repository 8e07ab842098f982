"""Turns what plugins print into log records.

Printed unchanged, foreign text could contain lines that look like log records, even of another chat,
and control sequences that a terminal executes.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final, TextIO

from loguru import logger

from nekro_agent.tools.visible_text import visible_text

__all__ = ["printed_to_log"]

#: A longer line is logged in parts.
_MAX_LINE_CHARS: Final = 4000


@contextmanager
def printed_to_log() -> Iterator[None]:
    """Log what Python code writes to ``sys.stdout`` and ``sys.stderr`` while the block lasts, line by line.

    Configure the log's own sink first. Writes of other programs and of C libraries to the descriptors 1
    and 2 are not captured.
    """
    with redirect_stdout(_Printed("stdout", sys.stdout)), redirect_stderr(_Printed("stderr", sys.stderr)):
        yield


class _Printed(io.TextIOBase):
    """A stream whose lines become log records under the stream's name."""

    def __init__(self, name: str, target: TextIO) -> None:
        self._name = name
        self._target = target
        #: Per thread: ``text``, the incomplete line, and ``logs``, whether it is logging now.
        self._here = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property there too
        """Encoding of the replaced stream."""
        return self._target.encoding

    def fileno(self) -> int:
        """Return the descriptor of the replaced stream, for use by other programs."""
        return self._target.fileno()

    def writable(self) -> bool:
        """Always True."""
        return True

    def write(self, text: str, /) -> int:
        """Log complete lines and buffer the rest."""
        if getattr(self._here, "logs", False):
            # Loguru is reporting an error of its sink; logging that would fail too.
            self._target.write(visible_text(text))
            return len(text)
        *lines, rest = (getattr(self._here, "text", "") + text).split("\n")
        if len(rest) > _MAX_LINE_CHARS:
            lines, rest = [*lines, rest], ""
        self._here.text = rest
        for line in lines:
            if line.strip():
                self._log(line)
        return len(text)

    def _log(self, line: str) -> None:
        self._here.logs = True
        try:
            logger.bind(name=self._name).info("{}", line)
        finally:
            self._here.logs = False
