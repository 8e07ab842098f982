"""What a decoded value may consist of, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from nekro_agent.errors import ArgumentError

__all__ = ["CONTAINERS", "LEAVES", "PLAIN_TYPES", "Budget", "KeyGuard"]

CONTAINERS: Final = frozenset({tuple, list, dict, set, frozenset})
LEAVES: Final = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        datetime,
        date,
        time,
        timedelta,
        timezone,
        ZoneInfo,
        Decimal,
        Fraction,
        UUID,
    }
)
#: Every type that a decoded value can consist of.
PLAIN_TYPES: Final = CONTAINERS | LEAVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one value may cost, beside its bytes."""

    #: Values inside it, a shared one counted at each place where it stands.
    nodes: int = 100_000
    #: Instructions; a value takes one to four, a date about eight.
    opcodes: int = 400_000
    #: Containers inside containers.
    depth: int = 64
    #: Size of texts and bytes, each time that they stand in one more place.
    repeated_bytes: int = 16 << 20
    #: Keys whose hash the sender can choose: all but text and bytes, which Python salts.
    chosen_keys: int = 10_000


_SALTED: Final = frozenset({str, bytes})
_NUMBERS: Final = frozenset({bool, int, float, type(None)})
_KEY_TYPES: Final = LEAVES - {bytearray} | {tuple, frozenset}
_KEY_DEPTH: Final = 4
#: Integers hash modulo 2**61 - 1; of 64 bits only a few share a hash.
_KEY_BITS: Final = 64
#: Keys of one container with one hash: -1 and -2 share theirs, and so do tuples that hold them.
_SAME_HASH: Final = 16


class KeyGuard:
    """Refuses keys that are slow to hash or chosen to collide, before anything hashes them.

    A dict of keys that all collide takes quadratic time, and a tuple that holds another one
    twice, forty levels deep, takes a million million steps to hash.
    """

    __slots__ = ("_budget", "_hashes", "_keys", "_parts")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._keys = self._parts = 0
        #: By id of a dict or set: how many keys have each hash.
        self._hashes: dict[int, dict[int, int]] = {}

    def check(self, keys: list[Any], *, target: object) -> None:
        """Check keys that are about to go into ``target``; None means a container of their own.

        Raises:
            ArgumentError: a type that cannot be a key, or too many, too deep, too alike.
        """
        counts: dict[int, int] = {}
        for key in keys:
            if type(key) in _SALTED:
                continue
            self._keys += 1
            if self._keys > self._budget.chosen_keys:
                raise ArgumentError(
                    f"more than {self._budget.chosen_keys} keys and members of sets that are no text; "
                    "send a list of pairs"
                )
            self._check(key, depth=0)
            if type(key) not in _NUMBERS:
                if target is not None and not counts:
                    counts = self._hashes.setdefault(id(target), counts)
                self._count(counts, hash(key))

    def _check(self, key: Any, *, depth: int) -> None:
        kind = type(key)
        if kind not in _KEY_TYPES:
            raise ArgumentError(f"a {kind.__name__} cannot be a key or a member of a set")
        if kind is int and key.bit_length() > _KEY_BITS:
            raise ArgumentError(
                f"an integer of more than {_KEY_BITS} bits cannot be a key or a member of a set"
            )
        if kind is tuple or kind is frozenset:
            if depth == _KEY_DEPTH:
                raise ArgumentError(
                    f"keys and members of sets can be nested {_KEY_DEPTH} levels deep, no deeper"
                )
            self._parts += len(key)
            if self._parts > self._budget.nodes:
                raise ArgumentError(f"tuples as keys hold more than {self._budget.nodes} values; send a list")
            for part in key:
                if type(part) not in _SALTED:
                    self._check(part, depth=depth + 1)

    @staticmethod
    def _count(counts: dict[int, int], value: int) -> None:
        counts[value] = count = counts.get(value, 0) + 1
        if count > _SAME_HASH:
            raise ArgumentError(f"more than {_SAME_HASH} keys or members of a set share one hash")
