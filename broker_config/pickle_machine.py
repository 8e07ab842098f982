"""A machine for the pickle instructions that plain values need; it can build nothing else.

Every instruction is a function ``(machine, position) -> position``, where ``position`` is that
of the next byte. What it builds may still be too large, too deep or half done: ``load`` in
``pickle_subset`` is the door, and looks at the result.

Source: the opcodes as the standard library's ``pickletools`` documents them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any, Final, TypeAlias

from broker_config.pickle_limits import Budget, KeyGuard
from broker_config.pickle_values import NAMED, NamedType, UuidShell, uuid_of
from nekro_agent.errors import ArgumentError

__all__ = ["Machine"]

_PROTOCOLS: Final = (4, 5)
_MAX_INT_BITS: Final = 4096
_SHOWN_CHARS: Final = 120

_STOP, _MARK, _BYTE, _SHORT, _GET, _SHORT_TEXT, _MEMOIZE = 0x2E, 0x28, 0x4B, 0x4D, 0x68, 0x8C, 0x94

_Instruction: TypeAlias = "Callable[[Machine, int], int]"


class Machine:
    """Runs one pickle."""

    __slots__ = ("_budget", "_repeated", "data", "keys", "marks", "memo", "stack")

    def __init__(self, data: bytes, budget: Budget) -> None:
        self.data = data
        self.stack: list[Any] = []
        #: Height of the stack at each open mark.
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.keys = KeyGuard(budget)
        self._budget = budget
        self._repeated = 0

    def run(self) -> object:
        """Execute up to STOP; returns the value, its insides unchecked.

        Raises:
            ArgumentError: an instruction or a name that no plain value needs, or the budget is spent.
            LookupError, ValueError, TypeError, ArithmeticError, struct.error: the pickle is malformed.
        """
        data, memoize = self.data, self.memo.append
        stack, push = self.stack, self.stack.append
        if data[:1] != b"\x80" or data[1] not in _PROTOCOLS:
            raise ArgumentError("this is no pickle of protocol 4 or 5")
        position = 2
        # The most frequent instructions stand here: a call each would double their time.
        for _ in repeat(None, self._budget.opcodes):
            code = data[position]
            position += 1
            if code == _SHORT_TEXT:
                start = position + 1
                position = start + data[position]
                push(str(data[start:position], "utf-8"))
            elif code == _MEMOIZE:
                memoize(stack[-1])
            elif code == _GET:
                self.recall(data[position])
                position += 1
            elif code == _BYTE:
                push(data[position])
                position += 1
            elif code == _SHORT:
                push(data[position] | data[position + 1] << 8)
                position += 2
            elif code == _MARK:
                self.marks.append(len(stack))
            elif code == _STOP:
                return self._result(position)
            else:
                position = _INSTRUCTIONS[code](self, position)
        raise ArgumentError(
            f"the value takes more than {self._budget.opcodes} instructions to read; send less"
        )

    def _result(self, position: int) -> object:
        # A text that ends behind the data also shows here, or as an IndexError.
        if position != len(self.data) or self.marks or len(self.stack) != 1:
            raise ValueError("it holds not exactly one value")
        return self.stack[0]

    def take(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes."""
        if size > len(self.data) - start:
            raise ValueError("it promises more bytes than there are")
        return self.data[start : start + size]

    def since_mark(self) -> list[Any]:
        """Close the newest mark; returns what was pushed behind it."""
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def target(self, kind: type) -> Any:
        """Return the container on top of the stack."""
        target = self.stack[-1]
        if type(target) is not kind:
            raise TypeError(f"a {type(target).__name__} is filled like a {kind.__name__}")
        return target

    def recall(self, index: int) -> None:
        """Push what was memoized."""
        value = self.memo[index]
        kind = type(value)
        if kind is str or kind is bytes or kind is bytearray:
            self._repeated += len(value)
            if self._repeated > self._budget.repeated_bytes:
                raise ArgumentError(
                    f"the value repeats texts of more than {self._budget.repeated_bytes} bytes; send less"
                )
        elif kind is UuidShell:
            value = value.value
        self.stack.append(value)


def _constant(value: object) -> _Instruction:
    def push(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        return position

    return push


def _empty(kind: type) -> _Instruction:
    def push(machine: Machine, position: int) -> int:
        machine.stack.append(kind())
        return position

    return push


def _number(form: str) -> _Instruction:
    layout = struct.Struct(form)
    unpack, size = layout.unpack_from, layout.size

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(unpack(machine.data, position)[0])
        return position + size

    return push


def _sized(form: str, build: Callable[[bytes], object]) -> _Instruction:
    """Make an instruction that is followed by a size and so many bytes."""
    layout = struct.Struct(form)

    def push(machine: Machine, position: int) -> int:
        size = layout.unpack_from(machine.data, position)[0]
        start = position + layout.size
        machine.stack.append(build(machine.take(start, size)))
        return start + int(size)

    return push


def _text(part: bytes) -> str:
    return str(part, "utf-8")


def _integer(part: bytes) -> int:
    # One byte more than the bits: the sign.
    if len(part) <= _MAX_INT_BITS // 8 + 1:
        value = int.from_bytes(part, "little", signed=True)
        if value.bit_length() <= _MAX_INT_BITS:
            return value
    raise ArgumentError(f"an integer of more than {_MAX_INT_BITS} bits cannot cross the sandbox boundary")


def _frame(machine: Machine, position: int) -> int:
    size = int.from_bytes(machine.take(position, 8), "little")
    if size > len(machine.data) - position - 8:
        raise ValueError("it promises more bytes than there are")
    return position + 8


def _recall_long(machine: Machine, position: int) -> int:
    machine.recall(int.from_bytes(machine.take(position, 4), "little"))
    return position + 4


def _short_tuple(size: int) -> _Instruction:
    def build(machine: Machine, position: int) -> int:
        stack = machine.stack
        if len(stack) < size:
            raise IndexError("it takes more than there is")
        stack[-size:] = [tuple(stack[-size:])]
        return position

    return build


def _tuple(machine: Machine, position: int) -> int:
    machine.stack.append(tuple(machine.since_mark()))
    return position


def _frozenset(machine: Machine, position: int) -> int:
    items = machine.since_mark()
    machine.keys.check(items, target=None)
    machine.stack.append(frozenset(items))
    return position


def _append(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    machine.target(list).append(item)
    return position


def _appends(machine: Machine, position: int) -> int:
    items = machine.since_mark()
    machine.target(list).extend(items)
    return position


def _add_items(machine: Machine, position: int) -> int:
    items = machine.since_mark()
    target = machine.target(set)
    machine.keys.check(items, target=target)
    target.update(items)
    return position


def _set_item(machine: Machine, position: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    target = machine.target(dict)
    machine.keys.check([key], target=target)
    target[key] = value
    return position


def _set_items(machine: Machine, position: int) -> int:
    items = machine.since_mark()
    target, keys = machine.target(dict), items[::2]
    machine.keys.check(keys, target=target)
    target.update(zip(keys, items[1::2], strict=True))
    return position


def _name(machine: Machine, position: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError("a name that is no text")
    known = NAMED.get(f"{module}.{name}")
    if known is None:
        raise ArgumentError(_foreign(module, name))
    machine.stack.append(known)
    return position


def _foreign(module: str, name: str) -> str:
    shown = name if module == "builtins" else f"{module}.{name}"
    shown = "".join(char if char.isprintable() else "?" for char in shown[:_SHOWN_CHARS])
    return f"type {shown} cannot cross the sandbox boundary; send plain values (dict, list, str, int, …)"


def _call(machine: Machine, position: int) -> int:
    args, known = machine.stack.pop(), machine.stack.pop()
    if type(args) is not tuple or type(known) is not NamedType:
        raise TypeError("a call of something else than a known type")
    try:
        machine.stack.append(known.build(args))
    except (LookupError, ValueError, TypeError, ArithmeticError) as exc:
        raise ArgumentError(f"this {known.name} cannot cross the sandbox boundary: {exc}") from None
    return position


def _new(machine: Machine, position: int) -> int:
    args, known = machine.stack.pop(), machine.stack.pop()
    if type(args) is not tuple or args or known is not NAMED["uuid.UUID"]:
        raise TypeError("an instance of something else than a UUID")
    machine.stack.append(UuidShell())
    return position


def _build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    shell = machine.target(UuidShell)
    shell.value = machine.stack[-1] = uuid_of(state)
    return position


def _unknown(machine: Machine, position: int) -> int:
    code = machine.data[position - 1]
    raise ArgumentError(f"the pickle holds instruction 0x{code:02x}, which no plain value needs")


_KNOWN: Final[dict[int, _Instruction]] = {
    0x29: _constant(()),  # EMPTY_TUPLE
    0x42: _sized("<I", bytes),  # BINBYTES
    0x43: _sized("<B", bytes),  # SHORT_BINBYTES
    0x47: _number(">d"),  # BINFLOAT
    0x4A: _number("<i"),  # BININT
    0x4E: _constant(None),  # NONE
    0x52: _call,  # REDUCE
    0x58: _sized("<I", _text),  # BINUNICODE
    0x5D: _empty(list),  # EMPTY_LIST
    0x61: _append,  # APPEND
    0x62: _build,  # BUILD
    0x65: _appends,  # APPENDS
    0x6A: _recall_long,  # LONG_BINGET
    0x73: _set_item,  # SETITEM
    0x74: _tuple,  # TUPLE
    0x75: _set_items,  # SETITEMS
    0x7D: _empty(dict),  # EMPTY_DICT
    0x81: _new,  # NEWOBJ
    0x85: _short_tuple(1),  # TUPLE1
    0x86: _short_tuple(2),  # TUPLE2
    0x87: _short_tuple(3),  # TUPLE3
    0x88: _constant(True),  # NEWTRUE
    0x89: _constant(False),  # NEWFALSE
    0x8A: _sized("<B", _integer),  # LONG1
    0x8B: _sized("<I", _integer),  # LONG4
    0x8D: _sized("<Q", _text),  # BINUNICODE8
    0x8E: _sized("<Q", bytes),  # BINBYTES8
    0x8F: _empty(set),  # EMPTY_SET
    0x90: _add_items,  # ADDITEMS
    0x91: _frozenset,  # FROZENSET
    0x93: _name,  # STACK_GLOBAL
    0x95: _frame,  # FRAME
    0x96: _sized("<Q", bytearray),  # BYTEARRAY8
}
_INSTRUCTIONS: Final[list[_Instruction]] = [_KNOWN.get(code, _unknown) for code in range(256)]
