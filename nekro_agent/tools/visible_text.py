r"""Makes text of unknown origin safe to show: in a line of a log, in a terminal, in a table.

Invisible characters and characters that control a terminal are written as an escape (``\x1b``, ``\n``,
``\u202e``) and never dropped. Escaped text is not changed again, so escaping twice is harmless.
"""

from __future__ import annotations

import os
import re
from typing import Final, TextIO

__all__ = ["has_colours", "shortened", "visible", "visible_json", "visible_lines", "visible_text"]

#: Controls (C0, DEL, C1), line and paragraph separators, marks that change the direction of text, characters
#: without width or glyph, tag characters and lone surrogates.
_HIDDEN: Final = (
    "\x00-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U00013430-\U00013440\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
#: Joiners and variation selectors: part of emoji and of several scripts; elsewhere they can hide data.
_JOINERS: Final = "\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f"
_PATTERN: Final = re.compile(f"[{_HIDDEN}][{_JOINERS}]*|[{_JOINERS}]+")
#: Everything but tabs, for text with columns.
_PATTERN_OF_LINES: Final = re.compile(f"(?!\t)(?:{_PATTERN.pattern})")
#: Everything but line feeds, which ``json.dumps`` writes between the items of an indented document.
_PATTERN_OF_JSON: Final = re.compile(f"(?!\n)(?:[{_HIDDEN}])")
#: Joiners that may appear alone: a single one, or the pair used in emoji. Longer runs can hide data.
_ONE_JOINER: Final = re.compile(f"[{_JOINERS}]|\ufe0f\u200d")
_KEYCAP: Final = "\u20e3"


def visible(text: str, *, limit: int = 0) -> str:
    r"""Return ``text`` as one line with every hidden or controlling character escaped.

    Args:
        limit: most characters of the result, not counting the note on how many are left out;
            0 means no limit.

    >>> print(visible("a\x1b[2J\r\nb"))
    a\x1b[2J\r\nb
    """
    if limit and len(text) > limit:
        return shortened(visible(text[:limit]), limit, hidden=len(text) - limit)
    if not (text.isascii() and text.isprintable()):
        text = _PATTERN.sub(_escaped, text)
    return shortened(text, limit) if limit else text


def visible_lines(text: str) -> list[str]:
    """Return the lines of ``text``, escaped except for tabs. Only ``\\n`` and ``\\r\\n`` end a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [line if line.isascii() and line.isprintable() else _kept_tabs(line) for line in lines]


def visible_text(text: str) -> str:
    """Return ``text`` with everything escaped but line feeds and tabs."""
    return "\n".join(visible_lines(text))


def visible_json(document: str) -> str:
    """Escape characters in a JSON document that JSON allows but terminals execute; values are unchanged."""
    return _PATTERN_OF_JSON.sub(_json_escaped, document)


def shortened(text: str, limit: int, *, hidden: int = 0) -> str:
    """Cut ``text`` to ``limit`` characters and append how many are left out.

    Args:
        hidden: characters that were already left out.
    """
    left_out = hidden + max(0, len(text) - limit)
    return f"{text[:limit]}… ({left_out} more characters)" if left_out else text


def _kept_tabs(line: str) -> str:
    return _PATTERN_OF_LINES.sub(_escaped, line)


def _escaped(match: re.Match[str]) -> str:
    run = match[0]
    return run if _joins(run, match) else run.encode("unicode_escape").decode("ascii")


def _joins(run: str, match: re.Match[str]) -> bool:
    """Whether a joiner is legitimate: after a character that is not ASCII, or in a keycap."""
    if not _ONE_JOINER.fullmatch(run):
        return False
    text, before = match.string, match.start() - 1
    return before >= 0 and (not text[before].isascii() or text[match.end() : match.end() + 1] == _KEYCAP)


def _json_escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def has_colours(stream: TextIO) -> bool:
    """Whether colours may be written to a stream: to a terminal, unless ``NO_COLOR`` is set and not empty.

    Source: https://no-color.org
    """
    return stream.isatty() and not os.environ.get("NO_COLOR")
