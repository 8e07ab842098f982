r"""Makes text of unknown origin safe to show: in a log, in a terminal, to a person who decides, in a prompt.

Invisible characters and characters that control a terminal are written as an escape (``\x1b``, ``\n``,
``\u202e``) and never dropped. Escaped text is not changed again, so escaping twice is harmless. Prompts drop
them instead (``without_invisible``), because a model reads what people do not see.

A character is invisible by its Unicode properties: ``Default_Ignorable_Code_Point``, or the general category
of controls, formats, surrogates, private use, unassigned, line and paragraph separators. Letters without ink
are invisible too.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping
from typing import Final, TextIO

__all__ = [
    "BLANK",
    "IGNORABLE",
    "JOINERS",
    "all_visible",
    "has_colours",
    "shortened",
    "visible",
    "visible_json",
    "visible_lines",
    "visible_text",
    "without_invisible",
]

#: The 4,174 code points with the property Default_Ignorable_Code_Point, as ranges for a regular expression.
#: Python has no such property. Source: Unicode Character Database 14.0.0, DerivedCoreProperties.txt; a test
#: compares it with the newer version in the package ``regex``.
IGNORABLE: Final = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
#: Letters and symbols whose glyph has no ink, besides ignorable ones: an empty Braille cell, a filler of
#: Khitan, a joiner of Tifinagh, a note without a head, blanks of hieroglyphs.
BLANK: Final = "\u2800\u2d7f\U00016fe4\U0001d159\U00013441\U00013442"
#: Joiners and variation selectors: part of emoji and of several scripts; elsewhere they can hide data.
JOINERS: Final = "\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f"
#: What has a general category of its own: controls, separators of lines and paragraphs, lone surrogates.
_CONTROLS: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
#: Not a joiner, and invisible. Characters of other categories are found by ``_is_invisible``.
_HIDDEN: Final = f"(?![{JOINERS}])[{IGNORABLE}{BLANK}{_CONTROLS}]"
_PATTERN: Final = re.compile(f"{_HIDDEN}[{JOINERS}]*|[{JOINERS}]+")
_EVERY: Final = re.compile(f"[{IGNORABLE}{BLANK}]")
#: Everything but tabs, for text with columns.
_PATTERN_OF_LINES: Final = re.compile(f"(?!\t)(?:{_PATTERN.pattern})")
#: Everything but line feeds, which ``json.dumps`` writes between the items of an indented document.
_PATTERN_OF_JSON: Final = re.compile(f"(?!\n){_HIDDEN}")
#: Everything but tabs and line feeds, for prompts.
_PATTERN_OF_PROMPTS: Final = re.compile(f"(?![\t\n])(?:{_PATTERN.pattern})")
_BLANKS: Final = re.compile(f"[{BLANK}\u115f\u1160\u3164\uffa0]")
#: Joiners that may appear alone: a single one, or the pair used in emoji. Longer runs can hide data.
_ONE_JOINER: Final = re.compile(f"[{JOINERS}]|\ufe0f\u200d")
_KEYCAP: Final = "\u20e3"
#: Signs of Arabic, Syriac and Kaithi that have a glyph, although their category is that of formats.
_SEEN_FORMATS: Final = frozenset(
    "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
)
#: What the patterns have left on purpose, although Python does not call it printable.
_JUDGED: Final = frozenset("\t\n\u200c\u200d") | _SEEN_FORMATS
#: Reserved for emoji that this version of Python may not know yet.
_PICTOGRAPH: Final = re.compile("[\U0001f000-\U0001faff\U0001fc00-\U0001fffd]")


def visible(text: str, *, limit: int = 0) -> str:
    r"""Return ``text`` as one line with every hidden or controlling character escaped.

    Joiners and variation selectors inside emoji and words of other scripts stay.

    Args:
        limit: most characters of the result, not counting the note on how many are left out;
            0 means no limit.

    >>> print(visible("a\x1b[2J\r\nb"))
    a\x1b[2J\r\nb
    """
    if limit and len(text) > limit:
        return shortened(visible(text[:limit]), limit, hidden=len(text) - limit)
    if not (text.isascii() and text.isprintable()):
        text = _with_others(_PATTERN.sub(_escaped, text))
    return shortened(text, limit) if limit else text


def all_visible(text: str) -> str:
    r"""Return ``text`` with everything escaped that is not a glyph, a space or a line feed.

    For what a person must read exactly, such as code that waits for approval: emoji are no exception.

    >>> print(all_visible("pay\u3164\ufe0f"))
    pay\u3164\ufe0f
    """
    if text.isascii() and text.isprintable():
        return text
    shown = _EVERY.sub(_always_escaped, text)
    return _translated(shown, {char: _escape(char) for char in set(shown) - {"\n"} if not char.isprintable()})


def visible_lines(text: str) -> list[str]:
    """Return the lines of ``text``, escaped except for tabs. Only ``\\n`` and ``\\r\\n`` end a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return [line if line.isascii() and line.isprintable() else _kept_tabs(line) for line in lines]


def visible_text(text: str) -> str:
    """Return ``text`` with everything escaped but line feeds and tabs."""
    return "\n".join(visible_lines(text))


def visible_json(document: str) -> str:
    """Escape characters in a JSON document that JSON allows but terminals execute; values are unchanged."""
    shown = _PATTERN_OF_JSON.sub(_json_escaped, document)
    return _translated(shown, {char: _json_escape(char) for char in _others(shown)})


def without_invisible(text: str, *, joiners: bool = True) -> str:
    r"""Return ``text`` for a prompt: invisible characters are dropped, but for tabs and line feeds.

    A letter without ink becomes a space, so that what is aligned stays aligned.

    Args:
        joiners: whether joiners and variation selectors inside emoji and words of other scripts stay.

    >>> without_invisible("a\u200bb\u2800c\U000e0041")
    'ab c'
    """
    if text.isascii() and text.isprintable():
        return text
    text = _BLANKS.sub(" ", text)
    text = _PATTERN_OF_PROMPTS.sub(_dropped if joiners else "", text)
    dropped = _others(text)
    dropped = (
        {char for char in dropped if not _PICTOGRAPH.match(char)} if joiners else dropped | _SEEN_FORMATS
    )
    return _translated(text, dict.fromkeys(dropped, ""))


def shortened(text: str, limit: int, *, hidden: int = 0) -> str:
    """Cut ``text`` to ``limit`` characters and append how many are left out.

    Args:
        hidden: characters that were already left out.
    """
    left_out = hidden + max(0, len(text) - limit)
    return f"{text[:limit]}… ({left_out} more characters)" if left_out else text


def _kept_tabs(line: str) -> str:
    return _with_others(_PATTERN_OF_LINES.sub(_escaped, line))


def _with_others(text: str) -> str:
    """Escape what the patterns do not list: formats of scripts, private use, unassigned characters."""
    return _translated(text, {char: _escape(char) for char in _others(text)})


def _others(text: str) -> set[str]:
    """Return the invisible characters of a text that no pattern lists."""
    odd = {char for char in set(text) - _JUDGED if not char.isprintable()}
    return {char for char in odd if unicodedata.category(char) != "Zs"}


def _translated(text: str, table: Mapping[str, str]) -> str:
    return text.translate({ord(char): shown for char, shown in table.items()}) if table else text


def _escaped(match: re.Match[str]) -> str:
    run = match[0]
    return run if _joins(run, match) else _escape(run)


def _always_escaped(match: re.Match[str]) -> str:
    return _escape(match[0])


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")


def _dropped(match: re.Match[str]) -> str:
    return match[0] if _joins(match[0], match) else ""


def _joins(run: str, match: re.Match[str]) -> bool:
    """Whether a joiner is legitimate: after a character that is not ASCII, or in a keycap."""
    if not _ONE_JOINER.fullmatch(run):
        return False
    text, before = match.string, match.start() - 1
    return before >= 0 and (not text[before].isascii() or text[match.end() : match.end() + 1] == _KEYCAP)


def _json_escaped(match: re.Match[str]) -> str:
    return _json_escape(match[0])


def _json_escape(char: str) -> str:
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def has_colours(stream: TextIO) -> bool:
    """Whether colours may be written to a stream: to a terminal, unless ``NO_COLOR`` is set and not empty.

    Source: https://no-color.org
    """
    return stream.isatty() and not os.environ.get("NO_COLOR")
