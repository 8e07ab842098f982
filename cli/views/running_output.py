"""What a program prints, line by line while it prints it."""

from __future__ import annotations

from collections.abc import Iterator

from nekro_agent.tools.visible_text import visible_lines

__all__ = ["RunningOutput"]


class RunningOutput:
    """The output of one round, put together from pieces of which some may be missing."""

    def __init__(self) -> None:
        self._begun = False
        #: Characters that came, without a gap since the beginning unless ``_has_gap``.
        self._end = 0
        self._has_gap = False
        #: The last line, which has no end yet.
        self._rest = ""

    def add(self, offset: int, text: str) -> Iterator[str]:
        """Yield the lines that a piece completes, as they are printed.

        Args:
            offset: number of characters of the output before the piece.
        """
        if not self._begun:
            self._begun = True
            yield "    output"
        if offset < self._end:  # another attempt at the round runs the code from its beginning
            yield from self.end()
            self._end, self._has_gap = 0, False
        if offset > self._end:
            self._has_gap = True
            yield from self.end()
            yield f"         | … {offset - self._end} characters are missing here; the round's end has them"
        self._end = offset + len(text)
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            yield from _lines(line)

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from _lines(rest)

    def is_all_of(self, output: str) -> bool:
        """Whether what came is the output of a round that has ended."""
        return not self._has_gap and self._end == len(output)


def _lines(line: str) -> Iterator[str]:
    for one in visible_lines(line) or [""]:
        yield f"         | {one}"
