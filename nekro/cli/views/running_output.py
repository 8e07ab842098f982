"""What a program prints, line by line while it prints it."""

from __future__ import annotations

from collections.abc import Iterator

from nekro_agent.tools.visible_text import visible_lines

__all__ = ["RunningOutput"]


class RunningOutput:
    """The output of one round, put together from pieces of which some may be missing or come late."""

    def __init__(self) -> None:
        #: What came, without a gap since the beginning unless ``_has_gap``.
        self._text = ""
        self._has_gap = False
        #: Number of characters of the output up to the end of the last piece.
        self._end = 0
        #: The last line, which has no end yet.
        self._rest = ""
        self._has_begun = self._is_ended = False

    def add(self, offset: int, text: str) -> Iterator[str]:
        """Yield the lines that a piece completes, as they are printed; none after ``finish``.

        Args:
            offset: number of characters of the output before the piece.
        """
        if self._is_ended:
            return
        if not self._has_begun:
            self._has_begun = True
            yield "    output"
        if offset < self._end:  # another attempt at the round runs the code from its beginning
            yield from self._end_line()
            self._text, self._end, self._has_gap = "", 0, False
        if offset > self._end:
            self._has_gap = True
            yield from self._end_line()
            yield f"         | … {offset - self._end} characters are missing here; the round's end has them"
        self._text += text
        self._end = offset + len(text)
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            yield from _lines(line)

    def finish(self, output: str) -> Iterator[str]:
        """Yield what is missing at the end of the output of a round that has ended.

        A round's end may be read before its last pieces come; these are ignored from now on.
        """
        if self._is_ended:
            return
        if self._has_begun and not self._has_gap and output.startswith(self._text):
            yield from self.add(self._end, output[self._end :])
        self._is_ended = True
        yield from self._end_line()

    def is_all_of(self, output: str) -> bool:
        """Whether what was printed is the output of a round that has ended."""
        return self._has_begun and not self._has_gap and self._text == output

    def _end_line(self) -> Iterator[str]:
        """Yield the last line, if it has no end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from _lines(rest)


def _lines(line: str) -> Iterator[str]:
    for one in visible_lines(line) or [""]:
        yield f"         | {one}"
