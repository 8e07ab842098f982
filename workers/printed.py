"""What plugins print becomes records of the log.

Printed as it is, text of others that a plugin prints could hold lines that read like records, also of
another chat, and sequences that a terminal obeys.
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

#: A line that does not end by then is written in parts.
_MAX_LINE_CHARS: Final = 4000


@contextmanager
def printed_to_log() -> Iterator[None]:
    """Log what Python code writes to ``sys.stdout`` and ``sys.stderr`` while the block lasts, line by line.

    The log's own sink must have been configured before. What other programs and C libraries write to the
    descriptors 1 and 2 is not seen.
    """
    with redirect_stdout(_Printed("stdout", sys.stdout)), redirect_stderr(_Printed("stderr", sys.stderr)):
        yield


class _Printed(io.TextIOBase):
    """A stream whose lines become records, under the name of the stream."""

    def __init__(self, name: str, target: TextIO) -> None:
        self._name = name
        self._target = target
        #: Per thread: ``text`` begun, and whether it ``logs`` just now.
        self._here = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property there too
        """Encoding of the stream that it stands for."""
        return self._target.encoding

    def fileno(self) -> int:
        """Return the descriptor of the stream that it stands for, as handed to other programs."""
        return self._target.fileno()

    def writable(self) -> bool:
        """Whether it can be written to: always."""
        return True

    def write(self, text: str, /) -> int:
        """Take text; whole lines are logged."""
        if getattr(self._here, "logs", False):
            # Loguru reports what is wrong with its sink; a record of that would fail as well.
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
