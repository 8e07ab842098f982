"""Pickles that somebody would write to harm the reader, each with a name; generated, none recorded."""

from __future__ import annotations

import collections
import enum
import os
import pickle
import struct
from collections.abc import Iterator
from typing import Any

MARK, STOP = b"(", b"."


class Reduces:
    """Pickles as a call of anything."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> Any:
        return self.reduction


class Colour(enum.Enum):
    """An enum of a plugin, which the host must not import."""

    RED = 1


def program(*parts: bytes) -> bytes:
    """A protocol 4 pickle of hand-written opcodes."""
    return b"\x80\x04" + b"".join(parts) + STOP


def text(value: str) -> bytes:
    """Push a short str."""
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def named(module: str, name: str) -> bytes:
    """Push a global."""
    return text(module) + text(name) + b"\x93"


def build(target: bytes, key: str, *, by_slots: bool = False) -> bytes:
    """Give a target a state with one attribute."""
    state = b"}" + text(key) + text("boom") + b"s"
    return program(target, b"N" + state + b"\x86" if by_slots else state, b"b")


def calls() -> Iterator[tuple[str, bytes]]:
    """Attempts to call something."""
    yield "os.system by REDUCE", pickle.dumps(Reduces(os.system, ("true",)), 4)
    yield "os.system in protocol 0", pickle.dumps(Reduces(os.system, ("true",)), 0)
    yield "os.system in protocol 2", pickle.dumps(Reduces(os.system, ("true",)), 2)
    yield "eval", pickle.dumps(Reduces(eval, ("1",)), 4)
    yield "exec", pickle.dumps(Reduces(exec, ("1",)), 5)
    yield "__import__", pickle.dumps(Reduces(__import__, ("os",)), 4)
    yield "getattr", program(named("builtins", "getattr"), named("builtins", "int"), text("real"), b"\x86R")
    yield "dotted name on int", program(named("builtins", "int.__subclasses__"), b")R")
    yield "dotted name to globals", program(named("collections", "OrderedDict.__init__.__globals__"))
    yield "dotted name to a class", program(named("datetime", "datetime.__class__"))
    yield "modules by a dotted module", program(named("collections._sys", "modules"))
    yield "modules by a dotted name", program(named("collections", "_sys.modules"))
    yield "INST", b"\x80\x04(S'id'\nios\nsystem\n."
    yield "OBJ", program(MARK, named("os", "system"), text("id"), b"o")
    yield "GLOBAL by text", b"\x80\x04cos\nsystem\n."
    yield "NEWOBJ of type", program(named("builtins", "type"), b")\x81")
    yield "NEWOBJ of object", program(named("builtins", "object"), b")\x81")
    yield "NEWOBJ of datetime", program(named("datetime", "datetime"), b")\x81")
    yield "NEWOBJ_EX", program(named("builtins", "dict"), b")}\x92")
    yield "EXT1", program(b"\x82\x01")
    yield "EXT2", program(b"\x83\x01\0")
    yield "EXT4", program(b"\x84\x01\0\0\0")
    yield "PERSID", b"\x80\x04Pevil\n."
    yield "BINPERSID", program(text("evil"), b"Q")
    yield "NEXT_BUFFER", b"\x80\x05\x97."
    yield "READONLY_BUFFER", b"\x80\x05" + text("x") + b"\x98."
    yield (
        "copyreg",
        program(
            named("copyreg", "_reconstructor"),
            named("builtins", "dict"),
            named("builtins", "object"),
            b"N\x87R",
        ),
    )
    yield "str.format", program(named("builtins", "str"), text("{0.__class__}"), b"\x85R")
    yield "a str is called", program(text("x"), b")R")
    yield "a call with a list", program(named("datetime", "date"), b"]R")


def states() -> Iterator[tuple[str, bytes]]:
    """Attempts to change something that stays."""
    ordered, day = named("collections", "OrderedDict"), named("datetime", "date")
    made_day = day + b"C\x04\x07\xe8\x01\x01\x85R"
    yield "BUILD on an OrderedDict", build(ordered + b")R", "__class__")
    yield "BUILD by slots on an OrderedDict", build(ordered + b")R", "keys", by_slots=True)
    yield "BUILD on the class OrderedDict", build(ordered, "evil", by_slots=True)
    yield "BUILD on a date", build(made_day, "x")
    yield "BUILD on the class date", build(day, "evil")
    yield "BUILD on a constructor", build(named("decimal", "Decimal"), "__defaults__")
    yield "BUILD of code", build(named("decimal", "Decimal"), "__code__", by_slots=True)
    yield "BUILD of globals", build(named("decimal", "Decimal"), "__wrapped__")
    yield "BUILD on a list", build(b"]", "append")
    yield "UUID with other state", build(named("uuid", "UUID") + b")\x81", "evil")
    yield (
        "UUID with a text as number",
        program(named("uuid", "UUID"), b")\x81}", text("int"), text("x"), b"sb"),
    )
    yield "UUID without state", program(named("uuid", "UUID"), b")\x81")
    yield (
        "UUID twice",
        program(
            named("uuid", "UUID"), b")\x81", b"}" + text("int") + b"K\1sb", b"}" + text("int") + b"K\2sb"
        ),
    )
    yield "UUID by REDUCE", program(named("uuid", "UUID"), text("0" * 32), b"\x85R")


def wrong_values() -> Iterator[tuple[str, bytes]]:
    """Types and shapes that are no plain data."""
    yield (
        "defaultdict of eval",
        program(named("collections", "defaultdict"), named("builtins", "eval"), b"\x85R"),
    )
    yield "defaultdict of list", pickle.dumps(collections.defaultdict(list), 4)
    yield "enum member", pickle.dumps(Colour.RED, 4)
    yield "a class", program(named("builtins", "int"))
    yield "a constructor's name as value", program(named("decimal", "Decimal"))
    yield "a name inside a tuple", program(named("decimal", "Decimal"), b"\x85")
    yield "a name inside a list", program(b"]", named("decimal", "Decimal"), b"a")
    yield "a mark as value", program(MARK)
    yield "a mark is remembered", program(MARK, b"\x94")
    yield (
        "list as time zone",
        program(named("datetime", "datetime"), b"C\x0a\x07\xe8\x01\x01\0\0\0\0\0\0", text("x"), b"\x86R"),
    )
    yield "datetime of numbers", program(named("datetime", "datetime"), b"(M\xe8\x07K\x01K\x01tR")
    yield "datetime of zero bytes", program(named("datetime", "datetime"), b"C\x0a" + b"\0" * 10 + b"\x85R")
    yield "huge timedelta", program(named("datetime", "timedelta"), b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85R")
    yield "lone surrogates", program(b"X\3\0\0\0\xed\xa0\x80")
    yield "invalid UTF-8", program(b"\x8c\x01\xff")
    yield "key is a list", program(b"}]K\1s")
    yield "key is a bytearray", program(b"}", b"\x96" + struct.pack("<Q", 1) + b"x", b"K\1s")
    yield "APPENDS to a str", program(text("x"), b"(K\1e")
    yield "APPEND to a dict", program(b"}K\1a")
    yield "SETITEMS on a list", program(b"](K\0K\1u")
    yield "SETITEM on a class", program(named("collections", "OrderedDict"), b"K\1K\2s")
    yield "SETITEMS with a key too many", program(b"}(K\0u")
    yield "ADDITEMS to a list", program(b"](K\0\x90")
    yield "recursive list", _recursive_list()
    yield "recursive dict", program(b"}\x94", text("x"), b"h\0s")
    yield "recursive tuple", program(b"]\x94h\0\x85a")
    yield "change after use", program(b"]\x94h\0\x85h\0K\1a\x86")


def _recursive_list() -> bytes:
    itself: list[Any] = []
    itself.append(itself)
    return pickle.dumps(itself, 4)


def bombs() -> Iterator[tuple[str, bytes]]:
    """Little input, much work or memory."""
    yield "bytearray of 2**40", program(named("builtins", "bytearray"), b"\x8a\x06\0\0\0\0\0\1\x85R")
    yield "bytes of 10**9", program(named("builtins", "bytes"), b"J\0\xca\x9a\x3b\x85R")
    yield (
        "int of 5000 digits",
        program(named("builtins", "int"), b"X" + struct.pack("<I", 5000) + b"9" * 5000 + b"\x85R"),
    )
    yield "INT of a million digits", b"\x80\x04I" + b"9" * 1_000_000 + b"\n."
    yield "range", program(named("builtins", "range"), b"K\0\x8a\x05\0\0\0\0\1\x86R")
    yield "list of a range", program(named("builtins", "list"), text("abc"), b"\x85R")
    yield "Decimal of 1e999999999", program(named("decimal", "Decimal"), text("1e999999999"), b"\x85R")
    yield "Fraction of 1e999999999", program(named("fractions", "Fraction"), text("1e999999999"), b"\x85R")
    yield "Fraction by zero", program(named("fractions", "Fraction"), b"K\1K\0\x86R")
    yield "frame of 2**62", b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N."
    for opcode, name in ((b"\x8e", "BINBYTES8"), (b"\x8d", "BINUNICODE8"), (b"\x96", "BYTEARRAY8")):
        yield f"{name} of 2**62", b"\x80\x05" + opcode + struct.pack("<Q", 2**62) + STOP
    yield "BINBYTES of 2**31", program(b"B" + struct.pack("<I", 2**31))
    yield "LONG4 of minus one byte", program(b"\x8b" + struct.pack("<i", -1))
    yield "LONG4 of 200 KB", program(b"\x8b" + struct.pack("<i", 200_000) + b"\xff" * 200_000)
    yield "LONG_BINPUT 2**30", program(b"Nr" + struct.pack("<I", 2**30))
    yield "100,000 lists in each other", program(b"]" * 100_000 + b"a" * 99_999)
    yield "50,000 tuples in each other", program(b")" + b"\x85" * 50_000)
    yield "a billion laughs", _laughs(9)
    yield (
        "a set of tuples that hash for ever",
        program(b")\x94", *(b"h" + bytes([i, 0x68, i]) + b"\x86\x94" for i in range(40)), b"\x8f(h\x28\x90"),
    )
    colliding = 2**61 - 1
    yield "20,000 colliding integer keys", pickle.dumps({i * colliding: 0 for i in range(20_000)}, 4)
    yield "a million opcodes", program(b"N" * 1_000_000)


def _laughs(levels: int) -> bytes:
    parts = [b"](", b"K\0" * 10, b"e\x94"]
    for level in range(levels):
        parts += [b"](", (b"h" + bytes([level])) * 10, b"e\x94"]
    return program(*parts)


def broken() -> Iterator[tuple[str, bytes]]:
    """Not quite pickles."""
    yield "nothing", b""
    yield "only a protocol", b"\x80\x04"
    yield "protocol 6", b"\x80\x06N."
    yield "no protocol", b"N."
    yield "empty stack at the end", program()
    yield "two values at the end", program(b"NN")
    yield "no end", b"\x80\x04N"
    yield "a second pickle behind", pickle.dumps(1, 4) + pickle.dumps(Reduces(os.system, ("true",)), 4)
    yield "REDUCE on nothing", program(b"R")
    yield "TUPLE3 on two", program(b"NN\x87")
    yield "TUPLE without mark", program(b"Nt")
    yield "POP_MARK", program(b"1")
    yield "BINGET of nothing", program(b"h\x05")
    yield "truncated text", b"\x80\x04\x8c\x09abc."
    yield "random bytes", b"\x80\x04" + bytes(range(7, 256, 5)) * 4
    yield "JSON", b'{"a": 1}'


def corpus() -> list[tuple[str, bytes]]:
    """All of them."""
    return [*calls(), *states(), *wrong_values(), *bombs(), *broken()]
