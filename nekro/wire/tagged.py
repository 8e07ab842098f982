"""Writes plain data as tagged JSON text; ``nekro.wire`` describes the format.

This module uses only C modules of the standard library: it is part of the program that runs in the
sandbox, where each import delays every start.
"""

from __future__ import annotations

import sys
from _json import encode_basestring, make_encoder
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__all__ = ["MOST_LEVELS", "NotPlainError", "TooLongError", "write_arguments", "write_text"]

#: Levels of nested containers.
MOST_LEVELS = 64
MOST_INT_BITS = 4096
SEND_PLAIN = "send plain values (dict, list, str, int, …)"

SCALARS = frozenset({str, int, float, bool, type(None)})
JSON_TYPES = SCALARS | {list, dict}
TEXT = frozenset({str})
CONSTANTS = {None: "null", True: "true", False: "false"}
values_of = dict.values
TAGS_OF_CONTAINERS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


class NotPlainError(TypeError):
    """The value contains something that has no tagged form; the message names it."""


class TooLongError(ValueError):
    """The text would have more characters than allowed."""


def refuse_type(value: Any) -> Any:
    """Refuse types that the C encoder cannot encode; ``is_json`` has already excluded them."""
    raise NotPlainError(type(value).__name__)


write_json = make_encoder(None, refuse_type, encode_basestring, None, ":", ",", False, False, False)


def write_text(value: Any, most_chars: int) -> str:
    """Write a value.

    Raises:
        NotPlainError: it contains something without a tagged form or itself, or is nested too deeply.
        TooLongError: the text would have more than ``most_chars`` characters.
    """
    text = write_json_text([value], value, most_chars)
    return check_length(Tagger(most_chars).text(value, 0) if text is None else text, most_chars)


def write_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], most_chars: int, *, simplifies: bool = False
) -> str:
    """Write the arguments of a call; raises as ``write_text`` does.

    Args:
        simplifies: whether numbers of numpy, times of pandas, Counter and defaultdict become the plain values
            that they stand for. Otherwise they have no form.
    """
    # Most calls have only scalar arguments; the C encoder writes a tuple as an array.
    if SCALARS.issuperset(map(type, args)) and not kwargs:
        text = encoded((args, kwargs))
    else:
        text = write_json_text([*args, kwargs], (args, kwargs), most_chars, levels=2)
    if text is None:
        text = Tagger(most_chars, simplifies=simplifies).text([list(args), kwargs], 0)
    return check_length(text, most_chars)


def check_length(text: str, most_chars: int) -> str:
    """Return the text if it is short enough."""
    if len(text) > most_chars:
        raise TooLongError
    return text


def write_json_text(items: list[Any], value: Any, most_chars: int, *, levels: int = 0) -> str | None:
    """Write a value of JSON's own types in one step; None when it needs tags or is invalid.

    Args:
        items: the parts of the value that must be checked.
        levels: number of containers around the items.
    """
    return encoded(value) if is_json(items, most_chars, levels) else None


def encoded(value: Any) -> str | None:
    """Write a value of JSON's own types, or None as ``write_json_text``."""
    try:
        text = "".join(write_json(value, 0))
    except (ValueError, RecursionError):  # NaN, a long integer
        return None
    # Without '"$' no key can be mistaken for a tag. Searching for one character is much faster than for two.
    return None if "$" in text and '"$' in text else text


def is_json(items: list[Any], most_chars: int, levels: int) -> bool:
    """Whether items consist of JSON's own types; shared parts count once per reference.

    All containers of a level are checked together, by C code.
    """
    chars = 0
    while True:
        kinds = set(map(type, items))
        if str in kinds:
            chars += sum([len(item) for item in items if type(item) is str])
        if chars > most_chars + 2:
            raise TooLongError
        if kinds <= SCALARS:
            return True
        if levels >= MOST_LEVELS or not kinds <= JSON_TYPES:
            return False
        lists = [item for item in items if type(item) is list]
        dicts = [item for item in items if type(item) is dict]
        chars += 2 * (sum(map(len, lists)) + sum(map(len, dicts)))
        if chars > most_chars + 2:
            raise TooLongError
        if not TEXT.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        chars += sum(map(len, chain.from_iterable(dicts)))
        if len(lists) == 1 and not dicts:
            items = lists[0]
        else:
            items = [*chain.from_iterable(lists), *chain.from_iterable(map(values_of, dicts))]
        levels += 1


class Tagger:
    """Writes values with tags, part by part; counts the minimum length of the text."""

    def __init__(self, most_chars: int, *, simplifies: bool = False) -> None:
        self.left = most_chars + 2
        self.simplifies = simplifies

    def text(self, value: Any, level: int) -> str:
        """Return the text of one value inside ``level`` containers."""
        kind = type(value)
        self.charge(2)
        if kind is str:
            self.charge(len(value))
            return encode_basestring(value)
        if kind is int:
            if value.bit_length() > MOST_INT_BITS:
                raise NotPlainError(
                    f"an integer of more than {MOST_INT_BITS} bits cannot cross the sandbox boundary"
                )
            return repr(value)
        if value is None or kind is bool:
            return CONSTANTS[value]
        if kind is float:
            text = repr(value)
            return text if value - value == 0 else f'{{"$float":"{text}"}}'
        if kind is list or kind is dict or kind in TAGS_OF_CONTAINERS or is_ordered(kind):
            return self.container(value, kind, level + 1)
        simple = SIMPLIFIED.get(f"{kind.__module__}.{kind.__qualname__}") if self.simplifies else None
        if simple is not None and is_own(kind):
            return self.text(simple(value), level)
        return self.leaf(value, kind)

    def charge(self, chars: int) -> None:
        """Subtract characters from the remaining limit."""
        self.left -= chars
        if self.left < 0:
            raise TooLongError

    def container(self, value: Any, kind: type, level: int) -> str:
        """Return the text of a built-in container."""
        if level > MOST_LEVELS:
            raise NotPlainError(f"the value is nested deeper than {MOST_LEVELS} levels or contains itself")
        if kind is list:
            return self.array(value, level)
        tag = TAGS_OF_CONTAINERS.get(kind)
        if tag is not None:
            return f'{{"{tag}":{self.array(value, level)}}}'
        if is_ordered(kind):
            return f'{{"$ordered":{self.pairs(value, level)}}}'
        if TEXT.issuperset(map(type, value)) and not any(key[:1] == "$" for key in value):
            self.charge(sum(map(len, value)))
            parts = [f"{encode_basestring(key)}:{self.text(item, level)}" for key, item in value.items()]
            return f"{{{','.join(parts)}}}"
        return f'{{"$dict":{self.pairs(value, level)}}}'

    def array(self, items: Any, level: int) -> str:
        """Return the text of an array."""
        return f"[{','.join([self.text(item, level) for item in items])}]"

    def pairs(self, value: Any, level: int) -> str:
        """Return the text of alternating keys and values."""
        return self.array([part for pair in value.items() for part in pair], level)

    def leaf(self, value: Any, kind: type) -> str:
        """Return the text of an instance of a class of the standard library."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        writer = WRITERS.get(name)
        if writer is None or not is_own(kind):
            shown = "".join(
                char if char.isprintable() else "?" for char in name.removeprefix("builtins.")[:120]
            )
            raise NotPlainError(f"type {shown} cannot cross the sandbox boundary; {SEND_PLAIN}")
        text: str = writer(self, value)
        return text

    def moment(self, tag: str, value: Any) -> str:
        """Return the text of a time or datetime."""
        text = value.replace(tzinfo=None, fold=0).isoformat()
        zone = value.tzinfo
        if zone is None and not value.fold:
            return f'{{"{tag}":"{text}"}}'
        return (
            f'{{"{tag}":["{text}",{value.fold},{"null" if zone is None else self.leaf(zone, type(zone))}]}}'
        )


def is_ordered(kind: type) -> bool:
    """Whether it is the class OrderedDict; a caller that has one has imported ``collections``."""
    return kind.__name__ == "OrderedDict" and kind is getattr(
        sys.modules.get("collections"), "OrderedDict", None
    )


def is_own(kind: type) -> bool:
    """Whether a class is what its module has under its name."""
    module = sys.modules.get(kind.__module__)
    return getattr(module, kind.__qualname__, None) is kind


def write_bytes(tagger: Tagger, value: Any) -> str:
    """Write bytes or a bytearray."""
    from binascii import b2a_base64

    tagger.charge(4 * len(value) // 3)
    # Base64 needs no escapes, so the string encoder is skipped.
    return f'{{"${type(value).__name__}":"{b2a_base64(value, newline=False).decode()}"}}'


def write_timezone(tagger: Tagger, value: Any) -> str:
    """Write a fixed offset."""
    offset, *name = value.__getinitargs__()
    microseconds = (offset.days * 86400 + offset.seconds) * 1_000_000 + offset.microseconds
    return f'{{"$timezone":{tagger.array([microseconds, *name], 0)}}}'


def write_zone(tagger: Tagger, value: Any) -> str:
    """Write a zone of the time zone database."""
    if value.key is None:
        raise NotPlainError("a ZoneInfo without a key cannot cross the sandbox boundary")
    return f'{{"$zone":{tagger.text(value.key, 0)}}}'


def write_path(tagger: Tagger, value: Any) -> str:
    """Write a path."""
    tag = "$path" if type(value).__name__ == "PosixPath" else "$purepath"
    return f'{{"{tag}":{tagger.text(str(value), 0)}}}'


WRITERS = {
    "builtins.bytes": write_bytes,
    "builtins.bytearray": write_bytes,
    "builtins.complex": lambda tagger, value: f'{{"$complex":{tagger.array((value.real, value.imag), 0)}}}',
    "datetime.datetime": lambda tagger, value: tagger.moment("$datetime", value),
    "datetime.time": lambda tagger, value: tagger.moment("$time", value),
    "datetime.date": lambda tagger, value: f'{{"$date":"{value.isoformat()}"}}',
    "datetime.timedelta": lambda tagger, value: (
        f'{{"$timedelta":[{value.days},{value.seconds},{value.microseconds}]}}'
    ),
    "datetime.timezone": write_timezone,
    "zoneinfo.ZoneInfo": write_zone,
    "decimal.Decimal": lambda tagger, value: f'{{"$decimal":"{value}"}}',
    "fractions.Fraction": lambda tagger, value: (
        f'{{"$fraction":{tagger.array((value.numerator, value.denominator), 0)}}}'
    ),
    "uuid.UUID": lambda tagger, value: f'{{"$uuid":"{value.hex}"}}',
    "pathlib.PosixPath": write_path,
    "pathlib.PurePosixPath": write_path,
    # The module's name in Python 3.13.
    "pathlib._local.PosixPath": write_path,
    "pathlib._local.PurePosixPath": write_path,
}

#: Classes that code has because of its packages, and the plain value of each. Models pass them to methods as
#: they come out of a data frame.
SIMPLIFIED = {
    **{
        f"numpy.{name}": lambda value: value.item()
        for name in (
            "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "float16", "float32", "float64", "str_",
        )
    },
    "pandas.Timestamp": lambda value: value.to_pydatetime(warn=False),
    "pandas.Timedelta": lambda value: value.to_pytimedelta(),
    # The modules' names before pandas 3.
    "pandas._libs.tslibs.timestamps.Timestamp": lambda value: value.to_pydatetime(warn=False),
    "pandas._libs.tslibs.timedeltas.Timedelta": lambda value: value.to_pytimedelta(),
    "collections.Counter": dict,
    "collections.defaultdict": dict,
}  # fmt: skip
