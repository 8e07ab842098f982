"""Output of commands: data to stdout, messages to stderr, a traceback only with ``--debug``.

Much of the output comes from chats, plugins and sandboxed code, so ``nekro_agent.tools.visible_text``
escapes all of it; only ``Output.data`` stays exact, and only where stdout is not a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from nekro.base.plain import to_plain
from nekro.cli.running import TerminatedError
from nekro.wire.author_frames import AuthorFrame, attached
from nekro_agent.errors import MethodFailedError, NekroError
from nekro_agent.tools.visible_text import has_colours, visible, visible_json, visible_lines, visible_text

__all__ = ["Output", "PartialError", "cell_width", "describe_error", "one_line"]

_ELLIPSIS = "…"
#: Indentation of the lines after the first one of a message, so that none looks like another message.
_CONTINUED = "    "
#: What ended a command from outside; neither is an error of the command.
_ENDED_BY: dict[type[BaseException], str] = {KeyboardInterrupt: "interrupted", TerminatedError: "terminated"}


def one_line(text: str, *, limit: int = 0) -> str:
    """Return text as one line with characters that are not printable escaped, cut to ``limit`` columns.

    Args:
        limit: 0 means no limit.
    """
    # Read no more than can be shown: a cell may come from a whole document.
    line = visible(text[: limit + 1] if limit else text)
    if not limit or cell_width(line) <= limit:
        return line
    kept, width = [], 0
    for char in line:
        width += cell_width(char)
        if width > limit - 1:
            break
        kept.append(char)
    return "".join(kept) + _ELLIPSIS


def cell_width(text: str) -> int:
    """Columns that text takes in a terminal: 2 for a wide (East Asian) character, 0 for a combining mark."""
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class PartialError(Exception):
    """A command failed and has a result nevertheless; ``--json`` prints both in one object."""

    def __init__(self, error: NekroError, result: Mapping[str, object]) -> None:
        """``error`` ends the command; ``result`` has the further keys of the object."""
        super().__init__(str(error))
        self.error = error
        self.result = result


def describe_error(error: BaseException, *, frames: Sequence[AuthorFrame] = ()) -> dict[str, Any]:
    """Return ``{type, message}``: the plugin's exception when a method raised, else ``error`` itself.

    Args:
        frames: places in the plugin's source; if there are any, the object has them as ``frames``.
    """
    if isinstance(error, MethodFailedError):
        described: dict[str, Any] = {"type": error.error_type, "message": error.error_message}
    else:
        name = type(error).__name__
        described = {"type": name, "message": str(error) or _ENDED_BY.get(type(error), name)}
    return described | ({"frames": frames} if frames else {})


class Output:
    """The two streams of a command."""

    def __init__(
        self,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        debug: bool = False,
        json_errors: bool = False,
    ) -> None:
        """Create the streams; ``json_errors``: ``error`` also writes an object to stdout."""
        self.stdout = stdout or sys.stdout
        self.stderr = stderr or sys.stderr
        self.debug = debug
        self.json_errors = json_errors
        for stream in (self.stdout, self.stderr):
            # A terminal of another encoding gets escapes instead of ending the command in an error.
            reconfigure = getattr(stream, "reconfigure", None)
            if reconfigure is not None:
                reconfigure(errors="backslashreplace")

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal."""
        return self.stdout.isatty()

    def data(self, text: str) -> None:
        """Write requested data and a line end: exact to a pipe, escaped to a terminal.

        For output of programs and values of methods; text of the command itself goes to ``report``.
        Flushed, so that the reader of a pipe gets it at once.
        """
        self._write(visible_text(text) if self.is_terminal else text)

    def piece(self, text: str) -> None:
        """Write a piece of requested data as ``data`` does, without a line end."""
        self.stdout.write(visible_text(text) if self.is_terminal else text)
        self.stdout.flush()

    def report(self, text: str) -> None:
        """Write text of the command itself to stdout; always escaped, as it may quote foreign text."""
        self._write(visible_text(text))

    def json(self, value: object) -> None:
        """Write one JSON document to stdout; the values are exact."""
        self._write(visible_json(json.dumps(to_plain(value), ensure_ascii=not self._is_utf8, indent=2)))

    def json_line(self, value: object) -> None:
        """Write one JSON document to stdout, as one line; the values are exact."""
        self._write(visible_json(json.dumps(to_plain(value), ensure_ascii=not self._is_utf8)))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a table to stdout: drawn for a terminal, in aligned plain columns for a pipe."""
        cells = [["" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
        if self.is_terminal:
            self._drawn_table(columns, cells)
        else:
            self._plain_table(columns, cells)

    def words(self, text: str) -> None:
        """Write a message to stderr; lines after the first one are indented."""
        first, *others = visible_lines(text)
        indented = (line if line.startswith(_CONTINUED) else _CONTINUED + line for line in others)
        self.stderr.write("\n".join([first, *indented]) + "\n")
        self.stderr.flush()

    def confirms(self, question: str) -> bool:
        """Ask a yes/no question; False when stdin or stderr is not a terminal, or the answer is not yes."""
        if not (sys.stdin.isatty() and self.stderr.isatty()):
            return False
        self.stderr.write(f"{visible(question)} [y/N] ")
        self.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: BaseException, *, result: Mapping[str, object] | None = None) -> None:
        """Print an error as one line; with ``--debug`` the traceback first, with ``--json`` also an object.

        Args:
            result: further keys of the object ``{"error": {type, message}}``.
        """
        if type(error) in _ENDED_BY:
            self.words(_ENDED_BY[type(error)])
        else:
            self._explain(error)
        if self.json_errors:
            # In one line, as `nekro tail --json` prints one object per line.
            self.json_line({**(result or {}), "error": describe_error(error, frames=self._frames(error))})

    def _frames(self, error: BaseException) -> tuple[AuthorFrame, ...]:
        """Return the places in a plugin's source to show: all with ``--debug``, else the innermost one."""
        frames = attached(error)
        return frames if self.debug else frames[-1:]

    def _explain(self, error: BaseException) -> None:
        if self.debug:
            self.words("".join(traceback.format_exception(error)).rstrip("\n"))
        for frame in self._frames(error):
            self.words(one_line(str(frame)))
        if isinstance(error, (NekroError, OSError)):
            self.words(f"error: {str(error) or type(error).__name__}")
        else:
            hint = "" if self.debug else " (`--debug` shows where)"
            self.words(f"error: internal error, {type(error).__name__}: {error}{hint}")

    def abandon_stdout(self) -> None:
        """Redirect stdout to /dev/null after the reader closed the pipe: Python then exits silently."""
        try:
            descriptor = self.stdout.fileno()
        except (OSError, ValueError):
            return
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

    @property
    def _is_utf8(self) -> bool:
        return (getattr(self.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"

    def _write(self, text: str) -> None:
        self.stdout.write(text + "\n")
        self.stdout.flush()

    def _drawn_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold" if has_colours(self.stdout) else "")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(file=self.stdout).print(table)

    def _plain_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [list(columns), *rows]
        widths = [max(cell_width(line[index]) for line in lines) for index in range(len(columns))]
        for line in lines:
            padded = [
                cell + " " * (width - cell_width(cell)) for cell, width in zip(line, widths, strict=True)
            ]
            self.stdout.write("  ".join(padded).rstrip() + "\n")
        self.stdout.flush()
