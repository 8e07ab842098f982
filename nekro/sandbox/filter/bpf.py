"""Classic BPF for seccomp: checks of a call's arguments, and a search tree over call numbers.

The kernel runs the filter at each system call whose verdict depends on an argument; it determines the
calls that are always allowed once, when it loads the filter (Linux 5.11). The search tree keeps both
short: about ten instructions to reach any call, instead of one per listed call.

Source: seccomp(2), and ``Documentation/userspace-api/seccomp_filter.rst`` of the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = [
    "AUDIT_ARCH",
    "RET_ALLOW",
    "RET_ERRNO",
    "RET_KILL_PROCESS",
    "Program",
    "allow_if",
    "answer",
    "no_bits",
    "none_of",
    "one_of",
    "pinned_tree",
    "when_bits",
]

AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: On x86_64, numbers from here on belong to the x32 ABI, which the table does not cover.
X32_BIT: Final = 0x40000000

RET_KILL_PROCESS: Final = 0x80000000
RET_ERRNO: Final = 0x00050000
RET_ALLOW: Final = 0x7FFF0000

_LOAD_WORD: Final = 0x20
_AND: Final = 0x54
_JUMP: Final = 0x05
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

#: Offsets in ``struct seccomp_data``; of each 64-bit argument the low word is read.
_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARGUMENTS: Final = 16
_WHOLE_WORD: Final = 0xFFFFFFFF
#: Largest offset of a conditional jump.
_MAX_OFFSET: Final = 255

Program = tuple[bytes, ...]


def answer(number: int) -> Program:
    """Fail the call with this error number; with 0, it returns 0 and has no effect."""
    return (_instruction(_RETURN, RET_ERRNO | number),)


def allow_if(*checks: Program) -> Program:
    """Allow the call when every check passes."""
    return (*(step for check in checks for step in check), _instruction(_RETURN, RET_ALLOW))


def one_of(argument: int, values: Sequence[int], *, otherwise: int, mask: int = _WHOLE_WORD) -> Program:
    """Fail with ``otherwise`` unless the argument's bits in ``mask`` are one of the values."""
    count = len(values)
    tests = [_instruction(_JUMP_EQUAL, value, if_true=count - index) for index, value in enumerate(values)]
    return (*_load_argument(argument, mask), *tests, *answer(otherwise))


def none_of(argument: int, values: Sequence[int], *, otherwise: int, mask: int = _WHOLE_WORD) -> Program:
    """Fail with ``otherwise`` when the argument's bits in ``mask`` are one of the values (one at least)."""
    *others, last = values
    count = len(others)
    tests = [_instruction(_JUMP_EQUAL, value, if_true=count - index) for index, value in enumerate(others)]
    final = _instruction(_JUMP_EQUAL, last, if_false=1)
    return (*_load_argument(argument, mask), *tests, final, *answer(otherwise))


def no_bits(argument: int, bits: int, *, otherwise: int) -> Program:
    """Fail with ``otherwise`` when any of the bits is set."""
    test = _instruction(_JUMP_ANY_BIT, bits, if_false=1)
    return (*_load_argument(argument, _WHOLE_WORD), test, *answer(otherwise))


def when_bits(argument: int, bits: int, then: Program) -> Program:
    """Apply the check only when any of the bits is set."""
    test = _instruction(_JUMP_ANY_BIT, bits, if_false=len(then))
    return (*_load_argument(argument, _WHOLE_WORD), test, *then)


def pinned_tree(machine: str, bodies: Mapping[int, Program], *, otherwise: Program) -> bytes:
    """Return the whole program for one architecture; calls that enter by another one kill the process.

    Args:
        machine: a key of ``AUDIT_ARCH``.
        bodies: by call number, a program that ends in a return on every path.
        otherwise: program for every other number.
    """
    steps = [
        _instruction(_LOAD_WORD, _OFFSET_ARCH),
        _instruction(_JUMP_EQUAL, AUDIT_ARCH[machine], if_true=1),
        _instruction(_RETURN, RET_KILL_PROCESS),
        _instruction(_LOAD_WORD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        steps += [
            _instruction(_JUMP_AT_LEAST, X32_BIT, if_false=1),
            _instruction(_RETURN, RET_KILL_PROCESS),
        ]
    return b"".join([*steps, *_tree(_ranges(bodies, otherwise))])


def _ranges(bodies: Mapping[int, Program], otherwise: Program) -> list[tuple[int, Program]]:
    """Return the first number of every run of numbers with one answer, and that answer; from 0 on."""
    ranges: list[tuple[int, Program]] = []
    for number in range(max(bodies) + 2):
        body = bodies.get(number, otherwise)
        if not ranges or ranges[-1][1] != body:
            ranges.append((number, body))
    return ranges


def _tree(ranges: Sequence[tuple[int, Program]]) -> Program:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    first = ranges[middle][0]
    below, from_there = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(below) <= _MAX_OFFSET:
        return (_instruction(_JUMP_AT_LEAST, first, if_true=len(below)), *below, *from_there)
    far = _instruction(_JUMP, len(below))
    return (_instruction(_JUMP_AT_LEAST, first, if_false=1), far, *below, *from_there)


def _load_argument(index: int, mask: int) -> Program:
    load = _instruction(_LOAD_WORD, _OFFSET_ARGUMENTS + 8 * index)
    return (load,) if mask == _WHOLE_WORD else (load, _instruction(_AND, mask))


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)
