"""Decodes short texts with the C scanner of ``json`` where its result provably equals the parser's.

``nekro.wire.parser`` defines the format. It runs Python code per value, which for most calls costs more than
the rest of the decoding. The C scanner accepts more than the parser (whitespace, duplicate keys, any
nesting, long numbers, lone surrogates), so every text that may contain one of these goes to the parser.
So does every text that fails here: the parser alone decides what is refused and composes the errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from json.scanner import c_make_scanner  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn

from nekro.wire.budget import Budget, Meter
from nekro.wire.constructors import BUILDERS
from nekro_agent.errors import ArgumentError

__all__ = ["SHORT_CHARS", "Undecided", "load_short"]

#: Maximum length. The scanner cannot be interrupted; no text of this length is near a limit of ``Budget``.
SHORT_CHARS: Final = 4 << 10

_BUDGET: Final = Budget()
#: Maps bytes outside of strings: brackets to parentheses, digits to 0.
_BRACKETS: Final = bytes.maketrans(b"[{]}", b"(())")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_DIGITS: Final = b"0" * 19
#: Exponents that could make a float infinite, or that the parser does not accept.
_LONG_EXPONENT: Final = re.compile(rb"e[+-]?000")
#: Tags whose value is a str, which an outer tag would accept as if it had been a plain string.
_TEXT_TAGS: Final = frozenset({"$path", "$purepath"})

_MALFORMED: Final = (ValueError, TypeError, LookupError, ArithmeticError)


class Undecided(Exception):
    """The parser must decode this text."""


def load_short(text: str) -> object:
    """Decode one value of at most ``SHORT_CHARS`` characters.

    Raises:
        Undecided: the text is longer, malformed, or contains something that the parser must check.
    """
    if len(text) > SHORT_CHARS:
        raise Undecided
    try:
        _check_outside(_outside_of_strings(text).encode("ascii"))
        # A key can begin with "$" only if the text contains '"$' or an escape.
        scan = _scan_tagged if '"$' in text or "\\u" in text else _scan
        value, end = scan(text, 0)
    except (*_MALFORMED, ArgumentError, StopIteration, RecursionError):
        raise Undecided from None
    if end != len(text):
        raise Undecided
    return value


def _outside_of_strings(text: str) -> str:
    """Return the characters outside of strings, if the text is well formed."""
    if "\\" in text:
        if "\\ud" in text or "\\uD" in text:  # an escaped surrogate
            raise Undecided
        text = text.replace("\\\\", "").replace('\\"', "")
    return "".join(text.split('"')[::2])


def _check_outside(outside: bytes) -> None:
    if outside.split() != [outside]:  # whitespace
        raise Undecided
    brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
    levels = 0
    # Each iteration removes the innermost pairs. Tags count as a level here, but not in the parser.
    while brackets:
        brackets, before = brackets.replace(b"()", b""), brackets
        levels += 1
        if levels > _BUDGET.depth or brackets == before:
            raise Undecided
    numbers = outside.translate(_DIGITS)
    if _LONG_DIGITS in numbers or b"E" in numbers:
        raise Undecided
    if b"0e" in numbers and _LONG_EXPONENT.search(numbers):
        raise Undecided


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise Undecided
    return mapping


def _tagged_object(pairs: list[tuple[str, Any]]) -> object:
    if len(pairs) == 1:
        key, payload = pairs[0]
        if key[:1] == "$":
            if key in _TEXT_TAGS:
                raise Undecided
            return BUILDERS[key](payload, Meter(_BUDGET))
    mapping = _object(pairs)
    for key in mapping:
        if key[:1] == "$":
            raise Undecided
    return mapping


def _refuse(constant: str) -> NoReturn:
    """Refuse ``NaN`` and ``Infinity``."""
    raise Undecided


class _Options:
    """The attributes that the C scanner reads."""

    strict = True
    object_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_refuse)

    def __init__(self, object_pairs_hook: Callable[[list[tuple[str, Any]]], object]) -> None:
        self.object_pairs_hook = object_pairs_hook


_scan: Final[Any] = c_make_scanner(_Options(_object))
_scan_tagged: Final[Any] = c_make_scanner(_Options(_tagged_object))
