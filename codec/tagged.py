"""Writes plain data as tagged JSON text; ``codec`` describes the format.

Standard library only, and of that the C modules: this module is part of the program that runs in
the sandbox, where each import is paid at every start.
"""

from __future__ import annotations

import sys
from _json import encode_basestring, make_encoder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__all__ = ["MOST_LEVELS", "NotPlainError", "TooLongError", "write_arguments", "write_text"]

#: Containers inside containers.
MOST_LEVELS = 64
MOST_INT_BITS = 4096
SEND_PLAIN = "send plain values (dict, list, str, int, …)"

SCALARS = frozenset({str, int, float, bool, type(None)})
JSON_TYPES = SCALARS | {list, dict}
TEXT = frozenset({str})
TAGS_OF_CONTAINERS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


class NotPlainError(TypeError):
    """The value holds something that has no tagged form; the message names it."""


class TooLongError(ValueError):
    """The text would have more characters than allowed."""


def refuse_type(value: Any) -> Any:
    """Refuse what the C encoder does not know; the walk before it lets none of these pass."""
    raise NotPlainError(type(value).__name__)


write_json = make_encoder(None, refuse_type, encode_basestring, None, ":", ",", False, False, False)


def write_text(value: Any, most_chars: int) -> str:
    """Write a value.

    Raises:
        NotPlainError: it holds something without a tagged form, is nested too deeply or holds itself.
        TooLongError: the text would have more than ``most_chars`` characters.
    """
    if is_json(value, most_chars):
        try:
            text = "".join(write_json(value, 0))
        except (ValueError, RecursionError):  # NaN, a long integer, a deep nesting: found again below
            text = '"$'
        # The mark of a tag is nowhere: no key can be taken for one.
        if '"$' not in text:
            return check_length(text, most_chars)
    return check_length("".join(write_json(Tagger(most_chars).tree(value, 0), 0)), most_chars)


def write_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], most_chars: int) -> str:
    """Write the arguments of a call; raises as ``write_text`` does."""
    # Most calls need no look inside of anything; a tuple is written as a list.
    if SCALARS.issuperset(map(type, args)) and SCALARS.issuperset(map(type, kwargs.values())):
        try:
            text = "".join(write_json((args, kwargs), 0))
        except ValueError:  # NaN, or a long integer
            text = '"$'
        if '"$' not in text:
            return check_length(text, most_chars)
    return write_text([list(args), kwargs], most_chars)


def check_length(text: str, most_chars: int) -> str:
    """Return the text if it is short enough."""
    if len(text) > most_chars:
        raise TooLongError
    return text


def is_json(value: Any, most_chars: int) -> bool:
    """Whether a value consists of JSON's own types; shared parts count as often as they stand there."""
    parts: list[Any] = [(value,)]
    chars = levels = 0
    while parts:
        deeper: list[Any] = []
        for part in parts:
            if type(part) is dict:
                if not TEXT.issuperset(map(type, part)):
                    return False
                chars += sum(map(len, part))
                part = part.values()
            kinds = set(map(type, part))
            chars += 2 * len(part)
            if str in kinds:
                chars += sum([len(item) for item in part if type(item) is str])
            if chars > most_chars + 2:
                raise TooLongError
            if not kinds <= SCALARS:
                if not kinds <= JSON_TYPES:
                    return False
                deeper += [item for item in part if type(item) is list or type(item) is dict]
        parts = deeper
        levels += 1
        if levels > MOST_LEVELS + 1:
            return False
    return True


class Tagger:
    """Makes a tree of JSON's own types of a value, with tags; counts what the text will have at least."""

    def __init__(self, most_chars: int) -> None:
        self.left = most_chars + 2

    def tree(self, value: Any, level: int) -> Any:
        """Return the tree of one value that stands inside ``level`` containers."""
        kind = type(value)
        self.charge(2)
        if kind is str:
            self.charge(len(value))
            return value
        if kind is int:
            if value.bit_length() > MOST_INT_BITS:
                raise NotPlainError(
                    f"an integer of more than {MOST_INT_BITS} bits cannot cross the sandbox boundary"
                )
            return value
        if value is None or kind is bool:
            return value
        if kind is float:
            return value if value - value == 0 else {"$float": repr(value)}
        if kind is list or kind is dict or kind in TAGS_OF_CONTAINERS or is_ordered(kind):
            return self.container(value, kind, level + 1)
        return self.leaf(value, kind)

    def charge(self, chars: int) -> None:
        """Take characters from what is left."""
        self.left -= chars
        if self.left < 0:
            raise TooLongError

    def container(self, value: Any, kind: type, level: int) -> Any:
        """Return the tree of a built-in container."""
        if level > MOST_LEVELS:
            raise NotPlainError(f"the value is nested deeper than {MOST_LEVELS} levels, or holds itself")
        if kind is list:
            return [self.tree(item, level) for item in value]
        tag = TAGS_OF_CONTAINERS.get(kind)
        if tag is not None:
            return {tag: [self.tree(item, level) for item in value]}
        if is_ordered(kind):
            return {"$ordered": self.pairs(value, level)}
        if TEXT.issuperset(map(type, value)) and not any(key[:1] == "$" for key in value):
            self.charge(sum(map(len, value)))
            return {key: self.tree(item, level) for key, item in value.items()}
        return {"$dict": self.pairs(value, level)}

    def pairs(self, value: Any, level: int) -> list[Any]:
        """Return keys and values in turn."""
        return [self.tree(part, level) for pair in value.items() for part in pair]

    def leaf(self, value: Any, kind: type) -> Any:
        """Return the tree of an instance of a class of the standard library."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        writer = WRITERS.get(name)
        if writer is None or getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
            shown = "".join(
                char if char.isprintable() else "?" for char in name.removeprefix("builtins.")[:120]
            )
            raise NotPlainError(f"type {shown} cannot cross the sandbox boundary; {SEND_PLAIN}")
        return writer(self, value)

    def moment(self, tag: str, value: Any) -> Any:
        """Return the tree of a time or datetime."""
        text = value.replace(tzinfo=None, fold=0).isoformat()
        if value.tzinfo is None and not value.fold:
            return {tag: text}
        zone = value.tzinfo
        return {tag: [text, value.fold, zone if zone is None else self.leaf(zone, type(zone))]}


def is_ordered(kind: type) -> bool:
    """Whether it is the class OrderedDict, which code that has one has imported."""
    return kind.__name__ == "OrderedDict" and kind is getattr(
        sys.modules.get("collections"), "OrderedDict", None
    )


def write_bytes(tagger: Tagger, value: Any) -> Any:
    """Bytes and bytearrays."""
    from binascii import b2a_base64

    tagger.charge(4 * len(value) // 3)
    return {f"${type(value).__name__}": b2a_base64(value, newline=False).decode()}


def write_timezone(tagger: Tagger, value: Any) -> Any:
    """A fixed offset."""
    offset, *name = value.__getinitargs__()
    return {"$timezone": [(offset.days * 86400 + offset.seconds) * 1_000_000 + offset.microseconds, *name]}


def write_zone(tagger: Tagger, value: Any) -> Any:
    """A zone of the time zone database."""
    if value.key is None:
        raise NotPlainError("a ZoneInfo without a key cannot cross the sandbox boundary")
    return {"$zone": value.key}


def write_path(tagger: Tagger, value: Any) -> Any:
    """A path."""
    return {"$path" if type(value).__name__ == "PosixPath" else "$purepath": str(value)}


def write_fraction(tagger: Tagger, value: Any) -> Any:
    """A fraction."""
    return {"$fraction": [tagger.tree(value.numerator, 0), tagger.tree(value.denominator, 0)]}


WRITERS = {
    "builtins.bytes": write_bytes,
    "builtins.bytearray": write_bytes,
    "builtins.complex": lambda tagger, value: {
        "$complex": [tagger.tree(value.real, 0), tagger.tree(value.imag, 0)]
    },
    "datetime.datetime": lambda tagger, value: tagger.moment("$datetime", value),
    "datetime.time": lambda tagger, value: tagger.moment("$time", value),
    "datetime.date": lambda tagger, value: {"$date": value.isoformat()},
    "datetime.timedelta": lambda tagger, value: {
        "$timedelta": [value.days, value.seconds, value.microseconds]
    },
    "datetime.timezone": write_timezone,
    "zoneinfo.ZoneInfo": write_zone,
    "decimal.Decimal": lambda tagger, value: {"$decimal": str(value)},
    "fractions.Fraction": write_fraction,
    "uuid.UUID": lambda tagger, value: {"$uuid": value.hex},
    "pathlib.PosixPath": write_path,
    "pathlib.PurePosixPath": write_path,
    # The module's name in Python 3.13.
    "pathlib._local.PosixPath": write_path,
    "pathlib._local.PurePosixPath": write_path,
}
