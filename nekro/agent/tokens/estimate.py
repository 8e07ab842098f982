"""Estimates the tokens of a text by the classes of its characters, without a tokenizer's tables.

The weights were fitted to four tokenizers of current models; ``docs/lab/tokens.md`` has their error. They err
to the high side. The work per character is a few passes over bytes in C.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["estimate_tokens", "features"]

#: Continuation bytes of UTF-8: the first byte of a character decides its class.
_CONTINUED: Final = bytes(range(0x80, 0xC0))


def _classes() -> bytes:
    table = bytearray(b"p" * 256)
    for name, members in {
        b"a": range(ord("a"), ord("z") + 1),
        b"A": range(ord("A"), ord("Z") + 1),
        b"d": range(ord("0"), ord("9") + 1),
        b"s": b" \t",
        b"n": b"\n\r",
        b"2": range(0xC2, 0xE0),  # Latin with accents, Greek, Cyrillic, Hebrew, Arabic
        b"J": (0xE3,),  # kana and punctuation of Chinese and Japanese
        b"C": range(0xE4, 0xEA),  # Chinese characters
        b"K": range(0xEA, 0xEE),  # Hangul
        b"3": (0xE0, 0xE1, 0xE2, 0xEE, 0xEF),  # other scripts, typographic signs
        b"4": range(0xF0, 0xF5),  # emoji and rare characters
    }.items():
        for byte in members:
            table[byte] = name[0]
    return bytes(table)


_CLASSES: Final = _classes()


def _only(*kept: bytes) -> bytes:
    """Return a table that keeps some classes and turns the others into spaces, for counting runs."""
    members = b"".join(kept)
    return bytes(byte if byte in members else 0x20 for byte in range(256))


_LETTERS: Final = _only(b"aA2")
_DIGITS: Final = _only(b"d")
_SIGNS: Final = _only(b"p")

#: Tokens for each, in the order of ``features``.
_WEIGHTS: Final = {
    "words": 0.432,
    "lower": 0.201,
    "upper": 0.634,
    "camel": 0.755,
    "digits": 1.021,
    "numbers": 0.287,
    "signs": 0.05,
    "sign_runs": 0.612,
    "lines": 1.099,
    "indents": 0.702,
    "spaces": 0.07,
    "accented": 0.307,
    "kana": 0.702,
    "han": 0.769,
    "hangul": 0.924,
    "other": 1.332,
    "emoji": 2.781,
}


def features(text: str) -> dict[str, int]:
    """Return how often each feature occurs in a text."""
    data = text.encode("utf-8", "replace").translate(_CLASSES, _CONTINUED)
    count = data.count
    return {
        "words": len(data.translate(_LETTERS).split()),
        "lower": count(b"a"),
        "upper": count(b"A"),
        "camel": count(b"aA"),
        "digits": count(b"d"),
        "numbers": len(data.translate(_DIGITS).split()),
        "signs": count(b"p"),
        "sign_runs": len(data.translate(_SIGNS).split()),
        "lines": count(b"n"),
        "indents": count(b"ns"),
        "spaces": count(b"ss"),
        "accented": count(b"2"),
        "kana": count(b"J"),
        "han": count(b"C"),
        "hangul": count(b"K"),
        "other": count(b"3"),
        "emoji": count(b"4"),
    }


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has for current models; 0 for an empty one."""
    if not text:
        return 0
    found = features(text)
    return max(1, math.ceil(sum(weight * found[name] for name, weight in _WEIGHTS.items())))
