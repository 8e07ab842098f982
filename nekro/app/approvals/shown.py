"""A call as an approver sees it: exactly what will run, as Python literals.

Every invisible character is escaped, also letters without ink, joiners and variation selectors, which
Python's ``repr`` leaves: no argument can hide a part of itself or of another one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import Match, SequenceMatcher
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from nekro.base.plain import to_json_value
from nekro.wire.values import Arguments, decode_arguments
from nekro_agent.errors import ArgumentError
from nekro_agent.tools.visible_text import all_visible

if TYPE_CHECKING:
    from storage.accounts.approvals import Approval

__all__ = [
    "MOST_ARGUMENT_BYTES",
    "arguments_of",
    "call_line",
    "compared",
    "cut_line",
    "difference",
    "plain_arguments",
    "shown_call",
]

#: Longest arguments, as tagged text, that a person can be asked to read.
MOST_ARGUMENT_BYTES: Final = 64 << 10
_WIDTH: Final = 100
#: A value that is nested deeper stands on one line: to lay out a level, all levels below are written.
_MOST_LEVELS: Final = 8
_INDENT: Final = "    "
#: Most characters of one argument, and of all arguments, of a call on one line.
_MOST_VALUE_CHARS: Final = 60
_MOST_LINE_CHARS: Final = 200
#: Parts of a long text: whole words of a line if they fit.
_PART: Final = re.compile(r"[^\n]{1,80}\Z|[^\n]{0,79}[ \n]|[^\n]{1,80}")


def arguments_of(text: str) -> Arguments:
    """Return the arguments of a tagged text.

    Raises:
        ArgumentError: it is malformed, or longer than ``MOST_ARGUMENT_BYTES``.
    """
    return decode_arguments(text, max_bytes=MOST_ARGUMENT_BYTES)


def plain_arguments(text: str) -> dict[str, Any]:
    """Return ``{"args", "kwargs"}`` as JSON data; ``shown_call`` is exact where JSON lacks a type."""
    args, kwargs = arguments_of(text)
    return {
        "args": [to_json_value(value) for value in args],
        "kwargs": {name: to_json_value(value) for name, value in kwargs.items()},
    }


def shown_call(method: str, text: str) -> str:
    """Return a call as Python source.

    Args:
        text: the arguments as tagged text.
    """
    method, lines = all_visible(method), list(_lines(text))
    if not lines:
        return f"{method}()"
    if len(lines) == 1 and "\n" not in lines[0]:
        return f"{method}({lines[0]})"
    body = "\n".join(f"{_INDENT}{line}," for entry in lines for line in [entry.replace("\n", f"\n{_INDENT}")])
    return f"{method}(\n{body}\n)"


def call_line(method: str, text: str) -> str:
    """Return a call on one line, for lists; ``shown_call`` is exact.

    Each long argument is cut, so that none hides those after it. Arguments that cannot be read are ``…``.

    Args:
        text: the arguments as tagged text.
    """
    shown: list[str] = []
    left = _MOST_LINE_CHARS
    try:
        args, kwargs = arguments_of(text)
    except ArgumentError:  # a forged row must not keep people from reading the others
        return f"{all_visible(method)}(…)"
    for name, value in chain(((None, value) for value in args), kwargs.items()):
        literal = cut_line(repr(value))
        part = literal if name is None else _named(name, literal, shown=cut_line)
        left -= len(part)
        if left < 0:
            shown.append("…")
            break
        shown.append(part)
    return f"{all_visible(method)}({', '.join(shown)})"


def difference(row: Approval) -> str:
    """Return what the approver changed, as a unified diff of the two calls; "" without a change."""
    if row.edited_arguments is None:
        return ""
    return compared(shown_call(row.method, row.arguments), shown_call(row.method, row.edited_arguments))


def compared(requested: str, approved: str) -> str:
    """Return a unified diff of two shown calls; "" if they are equal."""
    return "\n".join(_unified(requested.split("\n"), approved.split("\n")))


def _unified(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    for number, group in enumerate(_Comparison(before, after).get_grouped_opcodes()):
        if number == 0:
            yield from ("--- requested", "+++ approved")
        (_, start, _, new_start, _), (_, _, end, _, new_end) = group[0], group[-1]
        yield f"@@ -{_range(start, end)} +{_range(new_start, new_end)} @@"
        for tag, start, end, new_start, new_end in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[start:end])
            else:
                yield from (f"-{line}" for line in before[start:end])
                yield from (f"+{line}" for line in after[new_start:new_end])


def _range(start: int, end: int) -> str:
    """Return a range of lines as a unified diff writes it; an empty one names the line before it."""
    return f"{start + 1}" if end - start == 1 else f"{start + (end > start)},{end - start}"


class _Comparison(SequenceMatcher[str]):
    """Compares lines in n log n steps; the base class takes up to n**3.

    Lines that occur once on either side are matched first, then equal lines next to these and at both ends.
    All other lines count as replaced.

    Source: "patience diff" by Bram Cohen, without its recursion.
    """

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, after, autojunk=False)
        self._before, self._after = before, after

    def get_matching_blocks(self) -> list[Match]:
        """Return the blocks of equal lines and, as the base class does, an empty block at the end."""
        before, after = self._before, self._after
        blocks: list[Match] = []
        at, new_at = 0, 0
        for end, new_end in (*_anchors(before, after), (len(before), len(after))):
            if end < at:  # within the last block
                continue
            start, new_start = at, new_at
            while at < len(before) and new_at < len(after) and before[at] == after[new_at]:
                at, new_at = at + 1, new_at + 1
            if at > start:
                blocks.append(Match(start, new_start, at - start))
            if at < end or new_at < new_end:
                while end > at and new_end > new_at and before[end - 1] == after[new_end - 1]:
                    end, new_end = end - 1, new_end - 1
                at, new_at = end, new_end  # the next block begins with these equal lines
        if at < len(before):
            blocks.append(Match(at, new_at, len(before) - at))
        return [*blocks, Match(len(before), len(after), 0)]


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Return where lines are that occur once on either side: the longest series in the order of both."""
    counts, new_counts = Counter(before), Counter(after)
    places = {line: place for place, line in enumerate(after) if counts[line] == new_counts[line] == 1}
    #: By length, the series whose last place is the smallest: that place, and the series as linked pairs.
    last: list[int] = []
    series: list[tuple[int, int, Any]] = []
    for place, line in enumerate(before):
        new_place = places.get(line)
        if new_place is None:
            continue
        length = bisect_left(last, new_place)
        pair = (place, new_place, series[length - 1] if length else None)
        last[length : length + 1], series[length : length + 1] = [new_place], [pair]
    found: list[tuple[int, int]] = []
    rest = series[-1] if series else None
    while rest is not None:
        found.append(rest[:2])
        rest = rest[2]
    return found[::-1]


def _lines(text: str) -> Iterator[str]:
    args, kwargs = arguments_of(text)
    yield from (_literal(value) for value in args)
    yield from (_named(name, _literal(value), shown=all_visible) for name, value in kwargs.items())


def _named(name: str, literal: str, *, shown: Callable[[str], str]) -> str:
    """Return a named argument. A name is any string: code may write ``f(**{"a=1, b": 2})``."""
    return f"{shown(name)}={literal}" if _is_plain(name) else f"**{{{shown(repr(name))}: {literal}}}"


def cut_line(text: str) -> str:
    """Return the beginning of a text on one line, with ``…`` if more follows."""
    shown = all_visible(text[:_MOST_VALUE_CHARS])
    is_whole = max(len(text), len(shown)) <= _MOST_VALUE_CHARS
    return shown if is_whole else f"{shown[:_MOST_VALUE_CHARS]}…"


def _literal(value: object) -> str:
    return all_visible(repr(value) if _is_deep(value) else "\n".join(_laid_out(value)))


def _is_plain(name: str) -> bool:
    """Whether a name can stand before ``=``: identifiers may contain letters without ink."""
    return name.isidentifier() and all_visible(name) == name


def _laid_out(value: object) -> list[str]:
    """Return the lines of a value as Python source.

    ``pprint`` indents what a key holds by the length of the key, so two long ones make a text as long as
    their product.
    """
    if type(value) is dict and value:
        pairs = [(f"{key!r}: ", _laid_out(item)) for key, item in value.items()]
        return _bracketed("{", [[head + first, *rest] for head, (first, *rest) in pairs], "}")
    if type(value) is list and value:
        return _bracketed("[", map(_laid_out, value), "]")
    if type(value) is tuple and len(value) > 1:
        return _bracketed("(", map(_laid_out, value), ")")
    if type(value) is set and value:
        return _bracketed("{", map(_laid_out, sorted(value, key=repr)), "}")
    if type(value) is str and len(value) > _WIDTH and len(parts := _PART.findall(value)) > 1:
        return ["(", *(f"{_INDENT}{part!r}" for part in parts), ")"]
    return [repr(value)]


def _bracketed(opening: str, items: Iterable[list[str]], closing: str) -> list[str]:
    """Return the lines of a container: one if it is short, else at least one per item."""
    items = list(items)
    if all(len(lines) == 1 for lines in items):
        width = sum(len(lines[0]) + 2 for lines in items)
        if width <= _WIDTH:
            return [f"{opening}{', '.join(lines[0] for lines in items)}{closing}"]
    shown = [opening]
    for lines in items:
        shown += (f"{_INDENT}{line}" for line in lines)
        shown[-1] += ","
    return [*shown, closing]


def _is_deep(value: object) -> bool:
    """Whether a value has more than ``_MOST_LEVELS`` levels of containers."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        mappings = [one for one in level if isinstance(one, dict)]
        others = [one for one in level if isinstance(one, list | tuple | set | frozenset)]
        if not mappings and not others:
            return False
        inner = chain.from_iterable(chain(one.keys(), one.values()) for one in mappings)
        level = [*inner, *chain.from_iterable(others)]
    return True
