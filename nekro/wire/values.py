"""Arguments and results as tagged text; ``nekro.wire`` describes the format and the trust in it.

``nekro.wire.parser`` reads the format, with Python code per value, which for most calls costs more than the
rest of the decoding. So the C scanner of ``json`` decodes short texts where its result provably equals the
parser's. It accepts more than the parser (whitespace, duplicate keys, any nesting, long numbers, lone
surrogates), so every text that may contain one of these goes to the parser. So does every text that fails
in the scanner: the parser alone decides what is refused and composes the errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from json.scanner import c_make_scanner  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn, TypeAlias

from nekro.wire.budget import DecodeBudget, DecodeMeter
from nekro.wire.constructors import BUILDERS
from nekro.wire.parser import load, load_in_slices
from nekro.wire.returned_values import written
from nekro.wire.tagged import NotPlainError, TooLongError, write_arguments
from nekro_agent.errors import ArgumentError

__all__ = [
    "SHORT_CHARS",
    "Arguments",
    "Undecided",
    "arguments_in_slices",
    "arguments_text",
    "decode_arguments",
    "decode_value",
    "encode_arguments",
    "encode_value",
    "load_short",
    "pickled_for",
]

#: Maximum length. The scanner cannot be interrupted; no text of this length is near a limit of
#: ``DecodeBudget``.
SHORT_CHARS: Final = 4 << 10

_BUDGET: Final = DecodeBudget()
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
            return BUILDERS[key](payload, DecodeMeter(_BUDGET))
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


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_ARGUMENT_LIMIT: Final = "the limit of a call's arguments"

_NOT_ARGUMENTS: Final = "the value is not a pair of positional and named arguments"

_ARGUMENT_BUDGET: Final = DecodeBudget()
#: A worker's own value may be large, but it passes through the broker and is still limited.
_VALUE_BUDGET: Final = DecodeBudget(steps=4_000_000, built_bytes=512 << 20, seconds=30, chosen_keys=50_000)
#: Arguments of trusted callers; far above the worker's own limit, which is the one that is reported.
_MOST_CHARS: Final = 64 << 20

_PICKLE: Final = '{"$pickle":['

_CONTROL: Final = bytes(range(32))


def decode_arguments(data: bytes | str, *, max_bytes: int) -> Arguments:
    """Decode ``(args, kwargs)`` from a sandbox; builds only plain values, even from hostile ``data``.

    Raises:
        ArgumentError: the text is malformed, contains a type that is not allowed, or exceeds a limit.
    """
    text = _text(data, max_bytes, limit=_ARGUMENT_LIMIT)
    try:
        value = load_short(text)
    except Undecided:
        value = load(text, _ARGUMENT_BUDGET)
    return _arguments(value)


def arguments_text(data: bytes) -> str:
    """Return the bytes from a sandbox as a string for a message, without parsing them.

    Raises:
        ArgumentError: they are not UTF-8, or contain control characters, which JSON escapes would make six
            times as long.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ArgumentError("the value is malformed: it is not UTF-8") from None
    if len(data.translate(None, _CONTROL)) != len(data):
        raise ArgumentError("the value is malformed: it contains an unescaped control character")
    return text


def arguments_in_slices(data: bytes | str, *, max_bytes: int) -> Generator[None, None, Arguments]:
    """Decode as ``decode_arguments`` does, and yield after each slice of work of about 0.3 ms."""
    text = _text(data, max_bytes, limit=_ARGUMENT_LIMIT)
    return _arguments((yield from load_in_slices(text, DecodeMeter(_ARGUMENT_BUDGET))))


def _arguments(value: Any) -> Arguments:
    if type(value) is not list or len(value) != 2:
        raise ArgumentError(_NOT_ARGUMENTS)
    args, kwargs = value
    if type(args) is not list or type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
        raise ArgumentError(_NOT_ARGUMENTS)
    return tuple(args), kwargs


def decode_value(data: bytes | str, *, max_bytes: int) -> object:
    """Decode a method's return value outside the sandbox, to show it; paths become str.

    Raises:
        ArgumentError: it contains an instance of a plugin's class or anything else that is not plain.
    """
    text = _text(data, max_bytes, limit="the limit of a return value")
    if (reason := pickled_for(text)) is not None:
        raise ArgumentError(f"the value can be opened in a sandbox only: {reason}")
    return load(text, _VALUE_BUDGET)


def pickled_for(text: str) -> str | None:
    """Return why ``encode_value`` wrote a value as a pickle; None when it did not."""
    return str(json.loads(text)["$pickle"][0]) if text.startswith(_PICKLE) else None


def encode_arguments(args: tuple[Any, ...] | list[Any], kwargs: dict[str, Any]) -> str:
    """Encode arguments as sandboxed code would.

    Raises:
        ArgumentError: a worker would refuse them; the worker's size limit is not checked.
    """
    try:
        text = write_arguments(tuple(args), kwargs, _MOST_CHARS)
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            "an argument cannot be sent: a string is not valid Unicode (a lone surrogate?)"
        ) from None
    except TooLongError:
        raise ArgumentError(
            f"the arguments have more than {_MOST_CHARS} characters; send a file's path"
        ) from None
    except NotPlainError as exc:
        raise ArgumentError(f"an argument cannot be sent: {exc}") from None
    return text


def encode_value(value: object, *, max_bytes: int) -> bytes:
    """Encode the return value of a method for the sandbox.

    Pydantic models and dataclasses become dicts, Enum members their values, at any depth of
    containers. When it contains an instance of a class without a tagged form, the whole value is sent
    as a pickle; if the sandbox lacks the class, code there sees the instance's attributes.

    Raises:
        ResultError: it is too large, contains something that must stay on the worker (a context,
            settings, a session, an open file), or cannot be pickled; the message names what and where.
    """
    return written(value, max_bytes=max_bytes)


def _text(data: bytes | str, max_bytes: int, *, limit: str) -> str:
    size = len(data) if isinstance(data, bytes) or data.isascii() else len(data.encode())
    if size > max_bytes:
        raise ArgumentError(
            f"the value has {size} bytes, at most {max_bytes} can be sent ({limit}); "
            "write large data to a file in /app/shared and send its path"
        )
    return data if isinstance(data, str) else arguments_text(data)
