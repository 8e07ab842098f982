"""Parses untrusted tagged JSON text within a budget.

The parser keeps an explicit stack instead of recursing, so that deep nesting cannot exhaust Python's
stack, and yields after each slice of steps, so that its caller can do other work in between. The C
scanner of ``json`` reads only strings and short runs of scalars, because it cannot be interrupted and
silently keeps the last of two equal keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from json.decoder import JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from nekro.wire.budget import DecodeBudget, DecodeMeter
from nekro.wire.constructors import BUILDERS, MAX_INT_BITS
from nekro_agent.errors import ArgumentError

__all__ = ["SLICE_STEPS", "load", "load_in_slices"]

#: Steps between two checks of the clock; 1 step is about half a microsecond.
SLICE_STEPS: Final = 512

_NUMBER: Final = re.compile(
    r"(-?(?:0|[1-9][0-9]{0,1299}))((?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,5})?)", re.ASCII
)
_MAX_FLOAT_CHARS: Final = 48
#: Items of an array that need no further check: short numbers, constants, and short strings without
#: escapes.
_RUN: Final = re.compile(
    r"(?:(?:-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?(?:e[+-]?[0-9]{1,2})?"
    r'|"[^"\\\x00-\x1f]{0,120}"|true|false|null),){4,256}',
    re.ASCII,
)
_scan: Final[Callable[[str, int], tuple[list[Any], int]]] = JSONDecoder().scan_once  # type: ignore[attr-defined]
_CONSTANTS: Final = {"n": ("null", None), "t": ("true", True), "f": ("false", False)}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SHOWN_CHARS: Final = 40
#: Tags whose string is checked by its decoder.
_BASE64: Final = frozenset({"$bytes", "$bytearray"})

#: Memory of CPython's objects, a little above the figures of ``sys.getsizeof``.
_LIST_BYTES: Final = 64
_ITEM_BYTES: Final = 24
_DICT_BYTES: Final = 72
_PAIR_BYTES: Final = 168


class _Open:
    """An array, object or tag that is not closed yet."""

    __slots__ = ("items", "keys", "tag")

    def __init__(self, *, keys: list[str] | None = None, tag: str = "") -> None:
        self.items: list[Any] = []
        #: None for an array.
        self.keys = keys
        #: "" for an array or an ordinary object.
        self.tag = tag


def load(text: str, budget: DecodeBudget) -> object:
    """Read one value.

    Raises:
        ArgumentError: the text is malformed, contains anything but plain values, or exceeds the budget.
    """
    slices = load_in_slices(text, DecodeMeter(budget))
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def load_in_slices(text: str, meter: DecodeMeter) -> Generator[None, None, object]:
    """Read one value; yields after each slice of steps and returns the value.

    Raises:
        ArgumentError: as ``load``.
    """
    try:
        return (yield from _Parser(text, meter).run())
    except ArgumentError:
        raise
    except IndexError:
        raise ArgumentError("the value is malformed: its text ends too early") from None
    except (LookupError, ValueError, TypeError, ArithmeticError) as exc:
        raise ArgumentError(f"the value is malformed: {exc}") from None


class _Parser:
    """Parses one text once."""

    __slots__ = ("_at", "_depth", "_has_escapes", "_in_run", "_meter", "_open", "_text")

    def __init__(self, text: str, meter: DecodeMeter) -> None:
        self._text = text
        self._meter = meter
        #: Position of the next character.
        self._at = 0
        self._depth = 0
        #: Whether the innermost array has contained only runs of scalars so far.
        self._in_run = False
        self._open: list[_Open] = []
        #: Only an escape can produce a lone surrogate, because the text itself was UTF-8.
        self._has_escapes = "\\" in text and "\\u" in text

    def run(self) -> Generator[None, None, object]:
        """Parse to the end of the text; returns the value."""
        text, meter = self._text, self._meter
        next_stop = meter.steps + SLICE_STEPS
        while True:
            meter.steps += 1
            if meter.steps >= next_stop:
                meter.check_time()
                yield
                next_stop = meter.steps + SLICE_STEPS
            if self._in_run and self._takes_run():
                continue
            char = text[self._at]
            if char == '"':
                self._at += 1
                value: Any = self._base64() if self._is_base64() else self._string()
            elif char == "[" or char == "{":
                if self._begins(char):
                    continue
                value = [] if char == "[" else {}
            else:
                value = self._scalar(char)
            while self._open:
                container = self._open[-1]
                container.items.append(value)
                char = text[self._at]
                self._at += 1
                if char == ",":
                    if container.keys is not None or container.tag:
                        self._key(container)
                    break
                value = self._closed(container, char)
            else:
                self._finish()
                return value

    def _takes_run(self) -> bool:
        """Append several items of an array at once; False when the next item needs a full check."""
        match = _RUN.match(self._text, self._at)
        if match is None:
            self._in_run = False
            return False
        items, _ = _scan(f"[{match[0][:-1]}]", 0)
        self._open[-1].items += items
        self._at = match.end()
        self._meter.steps += len(items)
        self._meter.built_bytes += 4 * len(match[0]) + 48 * len(items)
        return True

    def _finish(self) -> None:
        if self._at != len(self._text):
            raise ValueError("extra data after the value")
        self._meter.check()

    def _is_base64(self) -> bool:
        return bool(self._open) and self._open[-1].tag in _BASE64

    def _base64(self) -> str:
        """Read a base64 string after its opening quote; its decoder checks each character."""
        begin = self._at
        end = self._text.index('"', begin)
        value = self._text[begin:end]
        if "\\" in value:
            return self._string()
        self._at = end + 1
        self._meter.built_bytes += len(value) + 56
        return value

    def _string(self) -> str:
        """Read a string after its opening quote."""
        begin = self._at
        value: str
        value, self._at = scanstring(self._text, begin, True)
        if value.isascii():
            self._meter.built_bytes += len(value) + 56
            return value
        self._meter.built_bytes += 4 * len(value) + 80
        if self._has_escapes and _SURROGATE.search(value):
            raise ArgumentError("a string is not valid Unicode (a lone surrogate?)")
        return value

    def _scalar(self, char: str) -> Any:
        """Read a number or constant."""
        self._meter.built_bytes += 32
        text, begin = self._text, self._at
        if char in _CONSTANTS:
            word, value = _CONSTANTS[char]
            if not text.startswith(word, begin):
                raise ValueError(f"{word} expected")
            self._at = begin + len(word)
            return value
        match = _NUMBER.match(text, begin)
        if match is None:
            raise ValueError(f"no value begins with {char!r}")
        self._at = match.end()
        whole, rest = match.groups()
        return self._float(whole + rest) if rest else self._integer(whole)

    def _integer(self, digits: str) -> int:
        if len(digits) < 19:
            return int(digits)
        # Parsing digits takes time in proportion to the square of their number.
        self._meter.charge(len(digits) * len(digits) >> 16, len(digits) // 2)
        value = int(digits)
        if value.bit_length() > MAX_INT_BITS or self._text[self._at : self._at + 1].isdigit():
            raise ArgumentError(
                f"an integer of more than {MAX_INT_BITS} bits cannot cross the sandbox boundary"
            )
        return value

    def _float(self, digits: str) -> float:
        if len(digits) > _MAX_FLOAT_CHARS:
            raise ValueError(f"a float is written in at most {_MAX_FLOAT_CHARS} characters")
        value = float(digits)
        if value - value != 0:
            raise ValueError("a float out of range")
        return value

    def _check_depth(self) -> None:
        if self._depth >= self._meter.budget.depth:
            raise ArgumentError(f"the value is nested deeper than {self._meter.budget.depth} levels")

    def _begins(self, char: str) -> bool:
        """Read the start of an array or object, or all of an empty one; return whether it has items."""
        return self._begins_array() if char == "[" else self._begins_object()

    def _begins_array(self) -> bool:
        self._check_depth()
        if self._text[self._at + 1] == "]":
            self._at += 2
            self._meter.built_bytes += _LIST_BYTES
            return False
        self._at += 1
        self._depth += 1
        self._open.append(_Open())
        self._in_run = True
        return True

    def _begins_object(self) -> bool:
        if self._text[self._at + 1] == "}":
            self._check_depth()
            self._at += 2
            self._meter.built_bytes += _DICT_BYTES
            return False
        self._at += 1
        self._in_run = False
        container = _Open(keys=[])
        self._key(container)
        if container.tag:
            if self._text[self._at] not in '["':
                raise ValueError("a tag must be followed by an array or a string")
        else:
            self._check_depth()
            self._depth += 1
        self._open.append(container)
        return True

    def _key(self, container: _Open) -> None:
        """Read a key and its colon."""
        keys = container.keys
        if keys is None:
            raise ValueError("a tag must be the only key of its object")
        if self._text[self._at] != '"':
            raise ValueError("a key expected")
        self._at += 1
        self._meter.steps += 1
        key = self._string()
        if self._text[self._at] != ":":
            raise ValueError("a colon expected")
        self._at += 1
        if key[:1] != "$":
            keys.append(key)
            return
        if keys or key not in BUILDERS:
            raise ValueError(f"unknown tag {_shown(key)}" if not keys else "a tag beside other keys")
        container.tag, container.keys = key, None

    def _closed(self, container: _Open, char: str) -> Any:
        """Return the value of a container that ``char`` closes."""
        if char != ("]" if container.keys is None and not container.tag else "}"):
            raise ValueError(f"{char!r} does not close the open array or object")
        self._open.pop()
        meter, items = self._meter, container.items
        if container.tag:
            return self._built(container.tag, items[0])
        self._depth -= 1
        keys = container.keys
        if keys is None:
            meter.built_bytes += _LIST_BYTES + _ITEM_BYTES * len(items)
            return items
        meter.built_bytes += _DICT_BYTES + _PAIR_BYTES * len(items)
        mapping = dict(zip(keys, items, strict=True))
        if len(mapping) != len(keys):
            raise ValueError("a duplicate key")
        return mapping

    def _built(self, tag: str, payload: Any) -> object:
        try:
            return BUILDERS[tag](payload, self._meter)
        except ArgumentError:
            raise
        except (LookupError, ValueError, TypeError, ArithmeticError) as exc:
            raise ArgumentError(f"this {tag[1:]} cannot cross the sandbox boundary: {exc}") from None


def _shown(key: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in key[:_SHOWN_CHARS])
