"""Builds the value of each tag from its payload, after checking the payload.

The real constructors accept more than the writers ever send (``Fraction("1e999999999")`` never
returns, ``ZoneInfo`` opens a file by name), so every part is checked for its exact type, size and
range first. A builder charges the meter before it builds: by size, in steps of half a microsecond.
A failure raises an ordinary ``ValueError``, ``TypeError`` or ``ArithmeticError``, which the parser reports.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

from nekro.wire.budget import DecodeMeter, check_keys

__all__ = ["BUILDERS", "MAX_INT_BITS"]

MAX_INT_BITS: Final = 4096
_MAX_DECIMAL_CHARS: Final = 1300
_MAX_DECIMAL_EXPONENT: Final = 400
_MAX_PATH_CHARS: Final = 4096
_MAX_NAME_CHARS: Final = 64
#: Offsets of time zones are less than a day.
_DAY_MICROSECONDS: Final = 24 * 3600 * 1_000_000

_DATE: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})", re.ASCII)
_TIME: Final = re.compile(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{6}))?", re.ASCII)
_DATETIME: Final = re.compile(f"{_DATE.pattern}T{_TIME.pattern}", re.ASCII)
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]{1,32}(?:/[A-Za-z0-9_+-]{1,32}){0,2}", re.ASCII)
_DECIMAL: Final = re.compile(
    r"-?(?:[0-9]+(?:\.[0-9]+)?(?:E[+-]?[0-9]{1,9})?|Infinity|s?NaN[0-9]{0,9})", re.ASCII
)
_UUID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FLOATS: Final = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

Builder = Callable[[Any, DecodeMeter], object]


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _text(payload: Any, most_chars: int) -> str:
    _require(
        type(payload) is str and len(payload) <= most_chars, f"a string of {most_chars} characters at most"
    )
    return str(payload)


def _integers(payload: Any, count: int) -> list[int]:
    _require(
        type(payload) is list and len(payload) == count and all(type(part) is int for part in payload),
        f"{count} integers expected",
    )
    return list(payload)


def _items(payload: Any) -> list[Any]:
    _require(type(payload) is list, "an array expected")
    items: list[Any] = payload
    return items


def _tuple(payload: Any, meter: DecodeMeter) -> object:
    return tuple(_items(payload))


def _set(payload: Any, meter: DecodeMeter) -> object:
    items = _items(payload)
    check_keys(items, meter)
    meter.charge(len(items), 200 + 64 * len(items))
    members = set(items)
    _require(len(members) == len(items), "a duplicate member")
    return members


def _frozenset(payload: Any, meter: DecodeMeter) -> object:
    members = _set(payload, meter)
    meter.charge(0, members.__sizeof__())
    return frozenset(members)  # type: ignore[call-overload]


def _dict(payload: Any, meter: DecodeMeter) -> object:
    items = _items(payload)
    keys = items[::2]
    _require(len(items) == 2 * len(keys), "a key without a value")
    check_keys(keys, meter)
    meter.charge(len(keys), 200 + 64 * len(keys))
    mapping = dict(zip(keys, items[1::2], strict=True))
    _require(len(mapping) == len(keys), "a duplicate key")
    return mapping


def _bytes(payload: Any, meter: DecodeMeter) -> bytes:
    _require(type(payload) is str, "a string expected")
    meter.charge(len(payload) >> 10, len(payload))
    # The decoder skips characters that are not base64. Its strict mode takes almost twice as long as this.
    data = a2b_base64(payload)
    padding = payload[-2:].count("=")
    _require(len(payload) % 4 == 0 and len(data) == len(payload) // 4 * 3 - padding, "not base64")
    return data


def _bytearray(payload: Any, meter: DecodeMeter) -> object:
    return bytearray(_bytes(payload, meter))


def _float(payload: Any, meter: DecodeMeter) -> object:
    return _FLOATS[_text(payload, 4)]


def _complex(payload: Any, meter: DecodeMeter) -> object:
    parts = _items(payload)
    _require(len(parts) == 2 and all(type(part) is float for part in parts), "two floats expected")
    return complex(parts[0], parts[1])


def _state_and_zone(payload: Any, meter: DecodeMeter) -> tuple[str, int, tzinfo | None]:
    meter.charge(4, 64)
    if type(payload) is str:
        return payload, 0, None
    _require(type(payload) is list and len(payload) == 3, "a string, or a string, fold and zone, expected")
    text, fold, zone = payload
    _require(type(text) is str, "a string expected")
    _require(type(fold) is int and fold in (0, 1), "a fold of 0 or 1 expected")
    _require(zone is None or type(zone) in (timezone, ZoneInfo), "an unknown kind of time zone")
    return text, fold, zone


def _numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    _require(len(text) <= 26, "a time expected")
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError("not in the format of isoformat()")
    return [int(part or 0) for part in match.groups()]


def _datetime(payload: Any, meter: DecodeMeter) -> object:
    text, fold, zone = _state_and_zone(payload, meter)
    year, month, day, hour, minute, second, micro = _numbers(_DATETIME, text)
    return datetime(year, month, day, hour, minute, second, micro, zone, fold=fold)


def _time(payload: Any, meter: DecodeMeter) -> object:
    text, fold, zone = _state_and_zone(payload, meter)
    hour, minute, second, micro = _numbers(_TIME, text)
    return time(hour, minute, second, micro, zone, fold=fold)


def _date(payload: Any, meter: DecodeMeter) -> object:
    meter.charge(3, 32)
    year, month, day = _numbers(_DATE, _text(payload, 10))
    return date(year, month, day)


def _timedelta(payload: Any, meter: DecodeMeter) -> object:
    meter.charge(2, 40)
    days, seconds, micros = _integers(payload, 3)
    _require(abs(days) < 10**9 and 0 <= seconds < 86400 and 0 <= micros < 10**6, "out of range")
    return timedelta(days, seconds, micros)


def _timezone(payload: Any, meter: DecodeMeter) -> object:
    meter.charge(4, 96)
    parts = _items(payload)
    _require(1 <= len(parts) <= 2 and type(parts[0]) is int, "an offset expected")
    _require(abs(parts[0]) < _DAY_MICROSECONDS, "an offset of a day or more")
    offset = timedelta(microseconds=parts[0])
    if len(parts) == 1:
        return timezone(offset) if offset else UTC
    return timezone(offset, _text(parts[1], _MAX_NAME_CHARS))


def _zone_info(payload: Any, meter: DecodeMeter) -> object:
    meter.charge(4, 0)
    name = _text(payload, _MAX_NAME_CHARS)
    # The name becomes part of a file's path, so only names of zones that exist are looked up.
    _require(_ZONE.fullmatch(name) is not None and name in _zone_names(), "an unknown zone")
    return _zone(name)


@cache
def _zone_names() -> frozenset[str]:
    """The zones of this machine; read once per process, because reading them lists directories."""
    return frozenset(available_timezones())


@cache
def _zone(name: str) -> ZoneInfo:
    """Cached without limit: the cache of ``ZoneInfo`` keeps only a few zones and would reread the file."""
    return ZoneInfo(name)


def _decimal(payload: Any, meter: DecodeMeter) -> object:
    text = _text(payload, _MAX_DECIMAL_CHARS)
    meter.charge(3 + (len(text) >> 5), 104 + len(text) // 2)
    _require(_DECIMAL.fullmatch(text) is not None, "a decimal number expected")
    number = Decimal(text)
    # int() of a number with a larger exponent would write out all its digits.
    _require(
        not number.is_finite() or abs(number.adjusted()) <= _MAX_DECIMAL_EXPONENT,
        f"an exponent beyond {_MAX_DECIMAL_EXPONENT}",
    )
    return number


def _fraction(payload: Any, meter: DecodeMeter) -> object:
    numerator, denominator = _integers(payload, 2)
    # The greatest common divisor takes time in proportion to the product of both lengths.
    bits = max(numerator.bit_length(), denominator.bit_length())
    meter.charge(6 + (bits * bits >> 15), 64)
    _require(denominator > 0, "a denominator above zero expected")
    number = Fraction(numerator, denominator)
    _require(number.denominator == denominator, "not in lowest terms")
    return number


def _uuid(payload: Any, meter: DecodeMeter) -> object:
    meter.charge(4, 64)
    text = _text(payload, 32)
    _require(_UUID.fullmatch(text) is not None, "32 hexadecimal digits expected")
    return UUID(int=int(text, 16))


def _path(payload: Any, meter: DecodeMeter) -> object:
    text = _text(payload, _MAX_PATH_CHARS)
    meter.charge(4 + (len(text) >> 5), len(text))
    return str(PurePosixPath(text))


#: Builders by tag; every other tag is refused.
BUILDERS: Final[dict[str, Builder]] = {
    "$tuple": _tuple,
    "$set": _set,
    "$frozenset": _frozenset,
    "$dict": _dict,
    "$ordered": _dict,
    "$bytes": _bytes,
    "$bytearray": _bytearray,
    "$float": _float,
    "$complex": _complex,
    "$datetime": _datetime,
    "$time": _time,
    "$date": _date,
    "$timedelta": _timedelta,
    "$timezone": _timezone,
    "$zone": _zone_info,
    "$decimal": _decimal,
    "$fraction": _fraction,
    "$uuid": _uuid,
    "$path": _path,
    "$purepath": _path,
}
