"""Pickles that somebody would write to harm the reader, each with a name; generated, none recorded."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import os
import pickle
import struct
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

MARK, STOP = b"(", b"."


class Reduces:
    """Pickles as a call of anything."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> Any:
        return self.reduction


class Name(str):
    """A plain type with a class of a plugin's."""


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
    yield (
        "huge timedelta",
        program(named("datetime", "timedelta"), b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\0K\0\x87R"),
    )
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
    value: list[Any] = [0] * 10
    for _ in range(levels):
        value = [value] * 10
    return pickle.dumps(value, 4)


def crafted_keys() -> Iterator[tuple[str, bytes]]:
    """Keys that make a dict or set slow, and more that is only large when it is opened."""
    # hash(-1) is hash(-2), so all of these have one hash.
    alike = list(itertools.product((-1, -2), repeat=10))
    yield "tuples of one hash as keys", pickle.dumps(dict.fromkeys(alike), 4)
    yield (
        "tuples of one hash, one by one",
        program(b"}", *(pickle.dumps(key, 4)[11:-1] + b"Ns" for key in alike)),
    )
    yield "tuples of one hash in a set", pickle.dumps(set(alike), 4)
    yield "tuples of one hash in a frozenset", pickle.dumps(frozenset(alike), 4)
    yield "fractions of one hash as keys", pickle.dumps(dict.fromkeys(_fractions_of_one_hash(40)), 4)
    yield "60,000 numbers in a set", pickle.dumps(set(range(60_000)), 4)
    row = tuple(range(1000))
    yield "a tuple of 1000 numbers in 2000 keys", pickle.dumps({(n, row): 1 for n in range(2000)}, 4)
    yield "an integer of 65 bits as key", pickle.dumps({2**64: 1}, 4)
    yield (
        "a signalling NaN as key",
        program(b"\x8f(", named("decimal", "Decimal"), text("sNaN"), b"\x85R\x90"),
    )
    yield "frozensets in each other", program(MARK * 9, b"\x91" * 9)
    long_text = b"X" + struct.pack("<I", 60_000) + b"x" * 60_000
    yield "a text of 60 KB, 70,000 times", program(b"](", long_text, b"\x94", b"h\0" * 70_000, b"e")
    yield "a shared list of 1000, 1001 times", pickle.dumps([[None] * 1000] * 1001, 4)


def _fractions_of_one_hash(count: int) -> list[Fraction]:
    # Numbers hash modulo this prime.
    return [Fraction(7 + index * (2**61 - 1), 1) for index in range(count)]


def odd_parts() -> Iterator[tuple[str, bytes]]:
    """Known types with parts that their own classes would take, or choke on."""
    moment, zone = named("datetime", "datetime"), named("zoneinfo", "ZoneInfo")
    yield "datetime at hour 255", program(moment, b"C\x0a\x07\xe8\x01\x01\xff\0\0\0\0\0\x85R")
    yield "datetime with 2**24 microseconds", program(moment, b"C\x0a\x07\xe8\x01\x01\0\0\0\xff\xff\xff\x85R")
    yield "time at hour 99", program(named("datetime", "time"), b"C\x06\x63\0\0\0\0\0\x85R")
    yield "date in month 77", program(named("datetime", "date"), b"C\x04\x07\xe8\x4d\x01\x85R")
    yield "time zone of a text", program(named("datetime", "timezone"), text("x"), b"\x85R")
    yield (
        "time zone with a long name",
        program(
            named("datetime", "timezone"),
            named("datetime", "timedelta"),
            b"K\0K\0K\1\x87R",
            text("x" * 200),
            b"\x86R",
        ),
    )
    unpickle = named("builtins", "getattr") + zone + text("_unpickle") + b"\x86R"
    yield "zone by a path", program(unpickle, text("../../etc/passwd"), b"K\1\x86R")
    yield "zone by an absolute path", program(unpickle, text("/etc/passwd"), b"K\1\x86R")
    yield "zone that is a folder", program(unpickle, text("America"), b"K\1\x86R")
    yield "zone that is no zone", program(unpickle, text("leapseconds"), b"K\1\x86R")
    yield "zone that does not exist", program(unpickle, text("Mars/Olympus"), b"K\1\x86R")
    yield (
        "another method of ZoneInfo",
        program(named("builtins", "getattr"), zone, text("clear_cache"), b"\x86R"),
    )
    yield "an attribute of a known type", program(named("builtins", "getattr"), moment, text("now"), b"\x86R")
    yield "the method itself as value", program(unpickle)
    yield "a path of 10,000 characters", pickle.dumps(PurePosixPath(*["x" * 100] * 100), 4)
    yield "a path of numbers", program(named("pathlib", "PosixPath"), b"K\1\x85R")
    yield "Decimal of 10,000 digits", pickle.dumps(Decimal("1." + "1" * 10_000), 4)
    yield "Decimal that is tiny", pickle.dumps(Decimal("1e-500"), 4)
    yield (
        "Fraction of 10,000 digits",
        program(named("fractions", "Fraction"), b"X" + struct.pack("<I", 10_000) + b"9" * 10_000 + b"\x85R"),
    )
    yield "complex of a text", program(named("builtins", "complex"), text("9" * 200), b"\x85R")
    yield "OrderedDict of a list", program(named("collections", "OrderedDict"), b"]\x85R")
    yield "a subclass of str", pickle.dumps(Name("x"), 4)
    yield "an instance of a plugin's class", pickle.dumps(Reduces(Name, ("x",)), 4)
    yield "a half built UUID in a list", program(b"]", named("uuid", "UUID"), b")\x81a")
    yield "a half built UUID as key", program(b"}", named("uuid", "UUID"), b")\x81Ns")
    yield "a half built UUID, recalled", program(named("uuid", "UUID"), b")\x81\x94h\0\x86")


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


@functools.cache
def corpus() -> list[tuple[str, bytes]]:
    """All of them."""
    return [*calls(), *states(), *wrong_values(), *bombs(), *crafted_keys(), *odd_parts(), *broken()]
