"""Reads pickles of plain values with a machine of our own, which can build nothing else.

Sandboxed code sends ``pickle.dumps(…, 4)``. ``pickle.Unpickler`` cannot be made safe for it:
whatever ``find_class`` allows can be poisoned by BUILD, and a few hundred bytes can hang or
fill a process (shared tuples as keys, billions of references, sizes without data). This
machine knows the instructions that plain values need, looks nothing up, calls only the
constructors in ``pickle_values``, and counts what the value would hold when written out.

Source: the opcodes are those of the standard library's ``pickletools``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from itertools import repeat
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from broker_config.pickle_values import MAX_INT_BYTES, NAMED, NamedType, UuidShell, uuid_of
from nekro_agent.errors import ArgumentError

__all__ = ["PLAIN_TYPES", "Budget", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one value may cost, beside its bytes."""

    #: Values inside it, a shared one counted at each place where it stands.
    nodes: int = 100_000
    #: Instructions; a value takes one to four, a date about eight.
    opcodes: int = 400_000
    #: Containers inside containers.
    depth: int = 64
    #: Characters and bytes of texts that stand in more than one place.
    repeated_bytes: int = 16 << 20
    #: Keys whose hash a sender can choose: all but text and bytes, which Python salts.
    chosen_keys: int = 10_000


_CONTAINERS: Final = frozenset({tuple, list, dict, set, frozenset})
_LEAVES: Final = frozenset(
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
PLAIN_TYPES: Final = _CONTAINERS | _LEAVES

_SALTED: Final = frozenset({str, bytes})
_NUMBERS: Final = frozenset({bool, int, float, type(None)})
_KEY_TYPES: Final = _LEAVES - {bytearray} | {tuple, frozenset}
_KEY_DEPTH = 4
#: hash() of integers repeats beyond 2**61; within 64 bits hardly ever.
_KEY_LOW, _KEY_HIGH = -(1 << 63), 1 << 64
#: Keys of one container with one hash; -1 and -2 share theirs, and so do tuples of them.
_SAME_HASH = 16

_UINT8, _UINT16, _INT32, _UINT32 = map(struct.Struct, ("<B", "<H", "<i", "<I"))
_UINT64, _FLOAT64 = struct.Struct("<Q"), struct.Struct(">d")

_STOP, _SHORT_TEXT, _MEMOIZE = 0x2E, 0x8C, 0x94
_SHOWN_CHARS = 120


class Machine:
    """Runs one pickle."""

    __slots__ = (
        "_chosen_left",
        "_hashes",
        "_repeated_left",
        "budget",
        "data",
        "memo",
        "outer",
        "position",
        "stack",
    )

    def __init__(self, data: bytes, budget: Budget) -> None:
        self.data = data
        self.budget = budget
        self.position = 0
        self.stack: list[Any] = []
        #: Stacks below the open marks.
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []
        self._chosen_left = budget.chosen_keys
        self._repeated_left = budget.repeated_bytes
        self._hashes: dict[int, dict[int, int]] | None = None

    def run(self) -> object:
        """Execute until STOP; returns the value, its insides not yet checked."""
        data, memo = self.data, self.memo
        self._start()
        for _ in repeat(None, self.budget.opcodes):
            position = self.position
            code = data[position]
            self.position = position + 1
            if code == _SHORT_TEXT:
                end = position + 2 + data[position + 1]
                if end > len(data):
                    raise ArgumentError("the pickle ends in the middle of a text")
                self.stack.append(str(data[position + 2 : end], "utf-8"))
                self.position = end
            elif code == _MEMOIZE:
                memo.append(self.stack[-1])
            elif code == _STOP:
                return self._result()
            else:
                _HANDLERS[code](self)
        raise ArgumentError(f"the value takes more than {self.budget.opcodes} steps to read; send less")

    def _start(self) -> None:
        if self.data[:1] != b"\x80" or self.data[1] not in (4, 5):
            raise ArgumentError("not a pickle of protocol 4 or 5")
        self.position = 2

    def _result(self) -> object:
        if self.position != len(self.data):
            raise ArgumentError("there is data behind the pickle's end")
        if self.outer or len(self.stack) != 1:
            raise ArgumentError("the pickle holds not exactly one value")
        return self.stack[0]

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        end = self.position + size
        if end > len(self.data):
            raise ArgumentError(f"the pickle promises {size} bytes and ends before them")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, form: struct.Struct) -> Any:
        """Return the next number."""
        value = form.unpack_from(self.data, self.position)[0]
        self.position += form.size
        return value

    def since_mark(self) -> list[Any]:
        """Close the newest mark; returns what was pushed behind it."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def recall(self, index: int) -> None:
        """Push a value that was memoized."""
        value = self.memo[index]
        if type(value) is UuidShell:
            value = value.value
        elif type(value) in _SALTED:
            self._repeated_left -= len(value)
            if self._repeated_left < 0:
                raise ArgumentError(
                    f"repeated texts add up to more than {self.budget.repeated_bytes} bytes; send each once"
                )
        self.stack.append(value)

    def check_keys(self, target: object, keys: list[Any]) -> None:
        """Refuse keys that are slow to hash or chosen to collide, before anything hashes them."""
        for key in keys:
            if type(key) not in _SALTED:
                self._check_key(key, depth=0)
                if type(key) not in _NUMBERS:
                    self._count_hash(target, hash(key))

    def _check_key(self, key: object, *, depth: int) -> None:
        kind = type(key)
        if kind not in _KEY_TYPES:
            raise ArgumentError(f"a key or set member cannot be a {kind.__name__}")
        self._chosen_left -= 1
        if self._chosen_left < 0:
            raise ArgumentError(
                f"more than {self.budget.chosen_keys} keys or set members that are no text; send a list"
            )
        if kind is int and not _KEY_LOW <= key < _KEY_HIGH:  # type: ignore[operator]
            raise ArgumentError("an integer of more than 64 bits cannot be a key or set member")
        if kind is tuple or kind is frozenset:
            if depth >= _KEY_DEPTH:
                raise ArgumentError(f"a key or set member is nested deeper than {_KEY_DEPTH} levels")
            for part in key:  # type: ignore[attr-defined]
                if type(part) not in _SALTED:
                    self._check_key(part, depth=depth + 1)
                else:
                    self._chosen_left -= 1

    def _count_hash(self, target: object, value: int) -> None:
        if self._hashes is None:
            self._hashes = {}
        counts = self._hashes.setdefault(id(target), {})
        counts[value] = count = counts.get(value, 0) + 1
        if count > _SAME_HASH:
            raise ArgumentError("keys or set members that all have the same hash")


def load(data: bytes, budget: Budget) -> object:
    """Read one pickled value.

    Raises:
        ArgumentError: it is malformed, holds anything but plain values, or exceeds the budget.
    """
    machine = Machine(data, budget)
    try:
        value = machine.run()
    except UnicodeDecodeError:
        raise ArgumentError("a text holds half a character (a lone surrogate); encode it otherwise") from None
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, struct.error) as exc:
        if isinstance(exc, ArgumentError):
            raise
        raise ArgumentError(f"the pickle is malformed at byte {machine.position}") from None
    check(value, budget)
    return value


def check(value: object, budget: Budget) -> None:
    """Walk a value level by level: plain types only, not too many, not too deep, no cycle.

    Raises:
        ArgumentError: it is not so.
    """
    level: list[Any] = [(value,)]
    nodes = 0
    for _ in range(budget.depth + 1):
        deeper: list[Any] = []
        for container in level:
            # Keys were checked when they came.
            items = container.values() if type(container) is dict else container
            nodes += len(items)
            if nodes > budget.nodes:
                raise ArgumentError(
                    f"it holds more than {budget.nodes} values; send less, or a file in ./shared"
                )
            kinds = set(map(type, items))
            if kinds <= _LEAVES:
                continue
            if not kinds <= PLAIN_TYPES:
                raise _not_plain(next(item for item in items if type(item) not in PLAIN_TYPES))
            deeper += [item for item in items if type(item) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise ArgumentError(f"it is nested deeper than {budget.depth} levels, or holds itself")


def _not_plain(item: object) -> ArgumentError:
    if type(item) is NamedType:
        return ArgumentError(f"class {item.name} cannot cross the sandbox boundary; send values")
    return ArgumentError("the pickle leaves a value half built")


def _text(machine: Machine, form: struct.Struct) -> None:
    machine.stack.append(str(machine.take(machine.number(form)), "utf-8"))


def _bytes(machine: Machine, size: int) -> None:
    machine.stack.append(machine.take(size))


def _integer(machine: Machine, size: int) -> None:
    if not 0 <= size <= MAX_INT_BYTES:
        raise ArgumentError(
            f"an integer of more than {8 * MAX_INT_BYTES} bits cannot cross the sandbox boundary"
        )
    machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))


def _frame(machine: Machine) -> None:
    size = machine.number(_UINT64)
    if size > len(machine.data) - machine.position:
        raise ArgumentError(f"the pickle promises {size} bytes and ends before them")


def _mark(machine: Machine) -> None:
    machine.outer.append(machine.stack)
    machine.stack = []


def _tuple(machine: Machine, size: int) -> None:
    stack = machine.stack
    if len(stack) < size:
        raise IndexError
    stack[-size:] = [tuple(stack[-size:])]


def _marked_tuple(machine: Machine) -> None:
    items = machine.since_mark()
    machine.stack.append(tuple(items))


def _target(machine: Machine, kind: type) -> Any:
    target = machine.stack[-1]
    if type(target) is not kind:
        raise TypeError
    return target


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _target(machine, list).append(item)


def _appends(machine: Machine) -> None:
    items = machine.since_mark()
    _target(machine, list).extend(items)


def _set_items(machine: Machine, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError
    target, keys = _target(machine, dict), items[::2]
    machine.check_keys(target, keys)
    target.update(zip(keys, items[1::2], strict=True))


def _set_item(machine: Machine) -> None:
    value = machine.stack.pop()
    _set_items(machine, [machine.stack.pop(), value])


def _add_items(machine: Machine) -> None:
    items = machine.since_mark()
    target = _target(machine, set)
    machine.check_keys(target, items)
    target.update(items)


def _frozenset(machine: Machine) -> None:
    items = machine.since_mark()
    machine.check_keys(None, items)
    machine.stack.append(frozenset(items))


def _name(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError
    known = NAMED.get(f"{module}.{name}")
    if known is None:
        raise ArgumentError(_foreign(module, name))
    machine.stack.append(known)


def _foreign(module: str, name: str) -> str:
    if (module, name) == ("builtins", "getattr"):
        return "an Enum member or a bound method cannot cross the sandbox boundary; send its value"
    shown = name if module == "builtins" else f"{module}.{name}"
    shown = "".join(char if char.isprintable() else "?" for char in shown[:_SHOWN_CHARS])
    return f"type {shown} cannot cross the sandbox boundary; send plain values (dict, list, str, int, …)"


def _call(machine: Machine) -> None:
    args, known = machine.stack.pop(), machine.stack.pop()
    if type(args) is not tuple or type(known) is not NamedType:
        raise TypeError
    try:
        machine.stack.append(known.build(args))
    except (LookupError, ValueError, TypeError, ArithmeticError) as exc:
        raise ArgumentError(f"a {known.name} cannot be read: {exc}") from None


def _new(machine: Machine) -> None:
    args, known = machine.stack.pop(), machine.stack.pop()
    if args != () or known is not NAMED["uuid.UUID"]:
        raise TypeError
    machine.stack.append(UuidShell())


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    shell = _target(machine, UuidShell)
    shell.value = machine.stack[-1] = uuid_of(state)


def _unknown(machine: Machine) -> None:
    code = machine.data[machine.position - 1]
    raise ArgumentError(f"the pickle holds instruction 0x{code:02x}, which no plain value needs")


def _handlers() -> list[Callable[[Machine], None]]:
    known: dict[int, Callable[[Machine], None]] = {
        0x28: _mark,
        0x29: lambda m: m.stack.append(()),
        0x42: lambda m: _bytes(m, m.number(_UINT32)),
        0x43: lambda m: _bytes(m, m.number(_UINT8)),
        0x47: lambda m: m.stack.append(m.number(_FLOAT64)),
        0x4A: lambda m: m.stack.append(m.number(_INT32)),
        0x4B: lambda m: m.stack.append(m.number(_UINT8)),
        0x4D: lambda m: m.stack.append(m.number(_UINT16)),
        0x4E: lambda m: m.stack.append(None),
        0x52: _call,
        0x58: lambda m: _text(m, _UINT32),
        0x5D: lambda m: m.stack.append([]),
        0x61: _append,
        0x62: _build,
        0x65: _appends,
        0x68: lambda m: m.recall(m.number(_UINT8)),
        0x6A: lambda m: m.recall(m.number(_UINT32)),
        0x73: _set_item,
        0x74: _marked_tuple,
        0x75: lambda m: _set_items(m, m.since_mark()),
        0x7D: lambda m: m.stack.append({}),
        0x81: _new,
        0x85: lambda m: _tuple(m, 1),
        0x86: lambda m: _tuple(m, 2),
        0x87: lambda m: _tuple(m, 3),
        0x88: lambda m: m.stack.append(True),
        0x89: lambda m: m.stack.append(False),
        0x8A: lambda m: _integer(m, m.number(_UINT8)),
        0x8B: lambda m: _integer(m, m.number(_INT32)),
        0x8D: lambda m: _text(m, _UINT64),
        0x8E: lambda m: _bytes(m, m.number(_UINT64)),
        0x8F: lambda m: m.stack.append(set()),
        0x90: _add_items,
        0x91: _frozenset,
        0x93: _name,
        0x95: _frame,
        0x96: lambda m: m.stack.append(bytearray(m.take(m.number(_UINT64)))),
    }
    return [known.get(code, _unknown) for code in range(256)]


_HANDLERS = _handlers()
