"""The few types that a pickle from a sandbox may name, each rebuilt here from checked parts.

The real constructors accept more than a pickle of theirs ever holds (``datetime`` takes ten
bytes unseen, ``Fraction("1e999999999")`` never returns), so every part is checked for its
exact type, size and range first. What fails raises an ordinary ``ValueError``,
``TypeError`` or ``ArithmeticError``, which the machine in ``pickle_subset`` reports.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

__all__ = ["NAMED", "NamedType", "UuidShell", "uuid_of"]

_MAX_DECIMAL_CHARS = 1300
_MAX_DECIMAL_EXPONENT = 400
_MAX_PATH_CHARS = 4096
_MAX_ZONE_CHARS = 64

#: Numerator and denominator within the integers' own limit.
_FRACTION = re.compile(r"(-?[0-9]{1,1233})(?:/([0-9]{1,1233}))?")
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,32}(?:/[A-Za-z0-9_+-]{1,32}){0,2}")
_TIME_ZONES = (timezone, ZoneInfo)


@dataclass(frozen=True, slots=True, eq=False)
class NamedType:
    """A type that a pickle named, not yet called. It is no value and never leaves the machine."""

    name: str
    build: Callable[[tuple[Any, ...]], object]


class UuidShell:
    """A UUID between its creation and its state; ``pickle`` writes it in two steps."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: UUID | None = None


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _state_and_zone(args: tuple[Any, ...], *, state_bytes: int) -> tuple[bytes, tzinfo | None]:
    _require(1 <= len(args) <= 2 and type(args[0]) is bytes, "no state")
    state: bytes = args[0]
    _require(len(state) == state_bytes, "a state of another size")
    zone = args[1] if len(args) == 2 else None
    _require(zone is None or type(zone) in _TIME_ZONES, "an unknown kind of time zone")
    return state, zone


def _datetime(args: tuple[Any, ...]) -> datetime:
    state, zone = _state_and_zone(args, state_bytes=10)
    year, month, day, hour, minute, second = struct.unpack(">HBBBBB", state[:7])
    return datetime(
        year,
        month & 0x7F,
        day,
        hour,
        minute,
        second,
        int.from_bytes(state[7:], "big"),
        zone,
        fold=month >> 7,
    )


def _date(args: tuple[Any, ...]) -> date:
    state, zone = _state_and_zone(args, state_bytes=4)
    _require(zone is None, "a date with a time zone")
    return date(*struct.unpack(">HBB", state))


def _time(args: tuple[Any, ...]) -> time:
    state, zone = _state_and_zone(args, state_bytes=6)
    hour, minute, second = state[:3]
    return time(hour & 0x7F, minute, second, int.from_bytes(state[3:], "big"), zone, fold=hour >> 7)


def _timedelta(args: tuple[Any, ...]) -> timedelta:
    _require(len(args) == 3 and all(type(part) is int for part in args), "three integers expected")
    return timedelta(*args)


def _timezone(args: tuple[Any, ...]) -> timezone:
    _require(1 <= len(args) <= 2 and type(args[0]) is timedelta, "an offset expected")
    if len(args) == 1:
        return timezone(args[0]) if args[0] else UTC
    _require(type(args[1]) is str and len(args[1]) <= _MAX_ZONE_CHARS, "a short name expected")
    return timezone(args[0], args[1])


def _zone_info(args: tuple[Any, ...]) -> ZoneInfo:
    _require(len(args) == 2 and type(args[0]) is str, "a zone's name expected")
    # The name becomes part of a file's path.
    _require(_ZONE.fullmatch(args[0]) is not None, "an unknown zone")
    try:
        return ZoneInfo(args[0])
    except OSError as exc:
        raise ValueError("an unknown zone") from exc


def _decimal(args: tuple[Any, ...]) -> Decimal:
    _require(len(args) == 1 and type(args[0]) is str, "a text expected")
    _require(len(args[0]) <= _MAX_DECIMAL_CHARS, "too many digits")
    number = Decimal(args[0])
    # int() of a larger one would write out all its digits.
    _require(
        not number.is_finite() or abs(number.adjusted()) <= _MAX_DECIMAL_EXPONENT,
        f"an exponent beyond {_MAX_DECIMAL_EXPONENT}",
    )
    return number


def _fraction(args: tuple[Any, ...]) -> Fraction:
    if len(args) == 2:
        _require(type(args[0]) is int and type(args[1]) is int, "two integers expected")
        return Fraction(args[0], args[1])
    _require(len(args) == 1 and type(args[0]) is str, "a text expected")
    match = _FRACTION.fullmatch(args[0])
    if match is None:
        raise ValueError("numerator/denominator expected")
    return Fraction(int(match[1]), int(match[2] or 1))


def _path(args: tuple[Any, ...]) -> str:
    _require(all(type(part) is str for part in args), "texts expected")
    _require(sum(map(len, args)) + len(args) <= _MAX_PATH_CHARS, f"more than {_MAX_PATH_CHARS} characters")
    return str(PurePosixPath(*args))


def _bytearray(args: tuple[Any, ...]) -> bytearray:
    _require(not args or (len(args) == 1 and type(args[0]) is bytes), "bytes expected")
    return bytearray(*args)


def _complex(args: tuple[Any, ...]) -> complex:
    _require(len(args) == 2 and all(type(part) is float for part in args), "two floats expected")
    return complex(args[0], args[1])


def _ordered_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    _require(not args, "no arguments expected")
    return {}


def _no_arguments(args: tuple[Any, ...]) -> object:
    raise ValueError("called in an unknown way")


def _attribute(args: tuple[Any, ...]) -> NamedType:
    # A ZoneInfo is pickled as a call of one of its class's methods; nothing is looked up here.
    _require(len(args) == 2 and args[0] is NAMED["zoneinfo.ZoneInfo"] and args[1] == "_unpickle", "refused")
    return NAMED["zoneinfo.ZoneInfo._unpickle"]


def uuid_of(state: object) -> UUID:
    """Build a UUID from the state that ``pickle`` keeps of one."""
    if type(state) is not dict or not state.keys() <= {"int", "is_safe"} or type(state.get("int")) is not int:
        raise ValueError("UUID: an unknown state")
    return UUID(int=state["int"])


_BUILDERS: Final[dict[str, Callable[[tuple[Any, ...]], object]]] = {
    "datetime.datetime": _datetime,
    "datetime.date": _date,
    "datetime.time": _time,
    "datetime.timedelta": _timedelta,
    "datetime.timezone": _timezone,
    "zoneinfo.ZoneInfo": _no_arguments,
    "zoneinfo.ZoneInfo._unpickle": _zone_info,
    "builtins.getattr": _attribute,
    "decimal.Decimal": _decimal,
    "fractions.Fraction": _fraction,
    "uuid.UUID": _no_arguments,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    # The module's name in Python 3.13.
    "pathlib._local.PosixPath": _path,
    "pathlib._local.PurePosixPath": _path,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "collections.OrderedDict": _ordered_dict,
}

#: By qualified name; every other name is refused.
NAMED: Final[dict[str, NamedType]] = {name: NamedType(name, build) for name, build in _BUILDERS.items()}
