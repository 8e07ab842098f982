"""Allowed types of a decoded value and limits on the cost of decoding it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from nekro_agent.errors import ArgumentError

__all__ = ["MEMORY_FACTOR", "PLAIN_TYPES", "DecodeBudget", "DecodeMeter", "check_keys"]

_CONTAINERS: Final = frozenset({tuple, list, dict, set, frozenset})
_LEAVES: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray),
        *(datetime, date, time_of_day, timedelta, timezone, ZoneInfo, Decimal, Fraction, UUID),
    }
)
#: Every type that a decoded value can contain.
PLAIN_TYPES: Final = _CONTAINERS | _LEAVES

#: A decoded value takes at most this many times the bytes of its text (nested objects with one empty
#: key come closest), and at most ``DecodeBudget.built_bytes``.
MEMORY_FACTOR: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBudget:
    """Limits on the cost of decoding one text; the length of the text is limited elsewhere."""

    #: A value or key costs one step; types that are built in Python cost more, in proportion to their
    #: size. A step takes about half a microsecond.
    steps: int = 200_000
    #: Memory of all objects that are built.
    built_bytes: int = 32 << 20
    #: CPU time of the decoding thread.
    seconds: float = 2.0
    #: Levels of nested containers.
    depth: int = 64
    #: Dict keys and set members whose hash the sender can choose: all but str and bytes, whose hashes
    #: Python salts.
    chosen_keys: int = 10_000


class DecodeMeter:
    """Cost of one decoding so far; each method raises ``ArgumentError`` beyond the budget."""

    __slots__ = ("_began_at", "budget", "built_bytes", "chosen_keys", "steps")

    def __init__(self, budget: DecodeBudget) -> None:
        self.budget = budget
        self.steps = self.built_bytes = self.chosen_keys = 0
        #: None until the clock is first read; most texts end before that.
        self._began_at: float | None = None

    def charge(self, steps: int, built_bytes: int) -> None:
        """Add steps and bytes, before or while they are used."""
        self.steps += steps
        self.built_bytes += built_bytes
        self.check()

    def check(self) -> None:
        """Compare the counters with the budget."""
        if self.steps > self.budget.steps:
            raise ArgumentError(
                f"the value takes more than {self.budget.steps} steps to read; send less, or a file's path"
            )
        if self.built_bytes > self.budget.built_bytes:
            raise ArgumentError(
                f"the value takes more than {self.budget.built_bytes} bytes of memory; send less, "
                "or a file's path"
            )

    def check_time(self) -> None:
        """Compare the thread's CPU time with the budget; call it on the decoding thread."""
        self.check()
        now = time.thread_time()
        if self._began_at is None:
            self._began_at = now
        if now - self._began_at > self.budget.seconds:
            raise ArgumentError(
                f"the value takes more than {self.budget.seconds:g} s to read; send less, or a file's path"
            )


_SALTED: Final = frozenset({str, bytes})
_NUMBERS: Final = frozenset({bool, int, float, type(None)})
_KEY_TYPES: Final = _LEAVES - {bytearray} | {tuple, frozenset}
_KEY_DEPTH: Final = 4
#: Integers hash modulo 2**61 - 1; only a few integers of 64 bits share a hash.
_KEY_BITS: Final = 64
#: Keys of one container with the same hash: -1 and -2 share one, and so do tuples that contain them.
_SAME_HASH: Final = 16


def check_keys(keys: list[Any], meter: DecodeMeter) -> None:
    """Refuse keys that are slow to hash or chosen to collide, before they are hashed.

    Building a dict whose keys all collide takes quadratic time.

    Raises:
        ArgumentError: a key has a type that cannot be a key or is nested too deeply, or too many keys
            are sent or share one hash.
    """
    counts: dict[int, int] = {}
    for key in keys:
        if type(key) in _SALTED:
            continue
        meter.chosen_keys += 1
        if meter.chosen_keys > meter.budget.chosen_keys:
            raise ArgumentError(
                f"more than {meter.budget.chosen_keys} dict keys and set members that are not strings; "
                "send a list of pairs"
            )
        _check_key(key, meter, depth=0)
        if type(key) not in _NUMBERS:
            _count(counts, hash(key))


def _check_key(key: Any, meter: DecodeMeter, *, depth: int) -> None:
    kind = type(key)
    if kind not in _KEY_TYPES:
        raise ArgumentError(f"a {kind.__name__} cannot be a key or a member of a set")
    if kind is int and key.bit_length() > _KEY_BITS:
        raise ArgumentError(f"an integer of more than {_KEY_BITS} bits cannot be a key or a member of a set")
    if kind is tuple or kind is frozenset:
        if depth == _KEY_DEPTH:
            raise ArgumentError(f"keys and members of sets can be nested at most {_KEY_DEPTH} levels deep")
        meter.charge(len(key), 0)
        for part in key:
            if type(part) not in _SALTED:
                _check_key(part, meter, depth=depth + 1)


def _count(counts: dict[int, int], value: int) -> None:
    counts[value] = count = counts.get(value, 0) + 1
    if count > _SAME_HASH:
        raise ArgumentError(f"more than {_SAME_HASH} keys or members of a set share one hash")
