"""Texts that are written to harm the reader, each with a name; all are generated.

The groups correspond to those of the pickles that an earlier decoder was tested with.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any


class Reduces:
    """Pickles as a call of an arbitrary function."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> Any:
        return self.reduction


def tagged(tag: str, payload: object) -> bytes:
    """One tag around a JSON payload."""
    return json.dumps({f"${tag}": payload}, separators=(",", ":")).encode()


def calls() -> Iterator[tuple[str, bytes]]:
    """Attempts to call or name something."""
    system = pickle.dumps(Reduces(os.system, ("true",)), 4)
    yield "a pickle", system
    yield "a pickle of protocol 0", pickle.dumps(Reduces(os.system, ("true",)), 0)
    yield "a pickle of protocol 2", pickle.dumps(Reduces(os.system, ("true",)), 2)
    yield "a pickle of plain values", pickle.dumps(((1,), {}), 4)
    yield "the tag of results", tagged("pickle", ["x", base64.b64encode(system).decode()])
    yield "the tag of results inside", b"[" + tagged("pickle", ["x", ""]) + b"]"
    for name in (
        "object", "eval", "__import__", "os.system", "builtins.getattr", "py/object", "type", "ref", "ref:1",
        "tuple ", "Tuple", "TUPLE", "tuple\u0000", "__class__", "module", "function", "code", "",
    ):  # fmt: skip
        yield f"tag {name!r}", tagged(name, ["x"])
    yield "a tag with a long name", tagged("x" * 100_000, [])
    yield "a tag written with escapes that is none", b'{"\\u0024ref":[0]}'
    yield "a tag beside a key", b'{"$tuple":[],"a":1}'
    yield "a key beside a tag", b'{"a":1,"$tuple":[]}'
    yield "two tags", b'{"$tuple":[],"$tuple":[]}'
    yield "a tag in a tag", b'{"$tuple":{"$tuple":[]}}'
    yield "50,000 tags in each other", b'{"$complex":' * 50_000 + b"1" + b"}" * 50_000


def wrong_values() -> Iterator[tuple[str, bytes]]:
    """Types and shapes that are not plain data."""
    for tag in (
        "tuple",
        "set",
        "frozenset",
        "dict",
        "ordered",
        "complex",
        "timedelta",
        "timezone",
        "fraction",
    ):
        yield f"{tag} of a text", tagged(tag, "x")
        yield f"{tag} of an object", tagged(tag, {"a": 1})
    for tag in (
        "bytes", "bytearray", "float", "date", "datetime", "time", "zone", "decimal", "uuid", "path",
        "purepath",
    ):  # fmt: skip
        yield f"{tag} of a number", tagged(tag, 1)
        yield f"{tag} of an array", tagged(tag, [[]])
        yield f"{tag} of null", tagged(tag, None)
    yield "a pair too few", tagged("dict", [1])
    yield "a key twice", b'{"a":1,"a":2}'
    yield "a key twice, once escaped", b'{"a":1,"\\u0061":2}'
    yield "a key twice in pairs", tagged("dict", [1, 2, 1, 3])
    yield "equal keys in pairs", tagged("dict", [1, 2, 1.0, 3])
    yield "a member twice", tagged("set", [1, True])
    yield "key is a list", tagged("dict", [[], 1])
    yield "key is a dict", tagged("dict", [{}, 1])
    yield "key is a bytearray", tagged("dict", [{"$bytearray": ""}, 1])
    yield "member is a set", tagged("set", [{"$set": []}])
    yield "list as time zone", tagged("datetime", ["2024-01-01T00:00:00", 0, []])
    yield "text as time zone", tagged("datetime", ["2024-01-01T00:00:00", 0, "UTC"])
    yield "datetime of numbers", tagged("datetime", [2024, 1, 1])
    yield "datetime of zeros", tagged("datetime", "0000-00-00T00:00:00")
    yield "huge timedelta", tagged("timedelta", [10**18, 0, 0])
    yield "lone surrogate", b'"\\ud800"'
    yield "lone surrogate as key", b'{"\\udfff":1}'
    yield "surrogates in the wrong order", b'"\\udc00\\ud800"'
    yield "invalid UTF-8", b'"\xff"'
    yield "an overlong slash", b'"\xc0\xaf"'
    yield "a surrogate in UTF-8", b'"\xed\xa0\x80"'


def bombs() -> Iterator[tuple[str, bytes]]:
    """Little input that causes much work or memory."""
    yield "int of 5000 digits", b"9" * 5000
    yield "int of a million digits", b"9" * 1_000_000
    yield "int of 4097 bits", str(2**4096).encode()
    yield "negative int of 4097 bits", str(-(2**4096)).encode()
    yield "float of a million digits", b"1." + b"9" * 1_000_000
    yield "float beyond the range", b"1e400"
    yield "float with a long exponent", b"1e" + b"9" * 100_000
    yield "Infinity", b"Infinity"
    yield "NaN", b"NaN"
    yield "-Infinity", b"-Infinity"
    yield "Decimal of 1e999999999", tagged("decimal", "1E+999999999")
    yield "Decimal of 1e-999999999", tagged("decimal", "1E-999999999")
    yield "Decimal of a million digits", tagged("decimal", "1" * 1_000_000)
    yield "Decimal with underscores", tagged("decimal", "1_0")
    yield (
        "Decimal in Arabic digits",
        json.dumps({"$decimal": "\u0661"}, ensure_ascii=False).replace(" ", "").encode(),
    )
    yield "Fraction by zero", tagged("fraction", [1, 0])
    yield "Fraction of 1e999999999", tagged("fraction", "1e999999999")
    yield "Fraction not in lowest terms", tagged("fraction", [2, 4])
    yield "Fraction with a negative denominator", tagged("fraction", [1, -2])
    yield "50,000 fractions", b"[" + b",".join([tagged("fraction", [1, 3])] * 50_000) + b"]"
    yield (
        "fractions of 4096 bits",
        b"[" + b",".join([tagged("fraction", [2**4095 - 19, 2**4095 - 1])] * 400) + b"]",
    )
    yield "100,000 arrays in each other", b"[" * 100_000 + b"]" * 100_000
    yield "100,000 arrays without an end", b"[" * 100_000
    yield "50,000 objects in each other", b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield "65 arrays in each other", b"[" * 65 + b"]" * 65
    yield "65 tuples in each other", b'{"$tuple":[' * 65 + b"]}" * 65
    yield "300,000 empty arrays", b"[" + b"[]," * 300_000 + b"1]"
    yield "300,000 empty objects", b"[" + b"{}," * 300_000 + b"1]"
    yield "500,000 numbers", b"[" + b"1," * 500_000 + b"1]"
    yield "150,000 objects of one key", b"[" + b'{"":1},' * 140_000 + b"1]"
    yield "a million characters that are no JSON", b"N" * 1_000_000
    yield "a million blanks", b" " * 1_000_000
    yield "a million quotes", b'"' * 1_000_000
    yield "a million backslashes without an end", b'"' + b"\\" * 1_000_000


def crafted_keys() -> Iterator[tuple[str, bytes]]:
    """Keys that collide in a dict or set."""
    # hash(-1) is hash(-2), so all of these have one hash.
    alike = [{"$tuple": list(key)} for key in itertools.product((-1, -2), repeat=10)]
    yield "tuples of one hash as keys", tagged("dict", [part for key in alike for part in (key, 1)])
    yield "tuples of one hash in a set", tagged("set", alike)
    yield "tuples of one hash in a frozenset", tagged("frozenset", alike)
    # Numbers hash modulo this prime.
    prime = 2**61 - 1
    yield "20,000 colliding integer keys", tagged("set", [index * prime for index in range(20_000)])
    yield "fractions of one hash", tagged("set", [{"$fraction": [7 + i * prime, 1]} for i in range(40)])
    yield (
        "decimals of one hash",
        tagged("set", [{"$decimal": str(7 + i * prime)} for i in range(40)]),
    )
    yield "60,000 numbers in a set", tagged("set", list(range(60_000)))
    row = {"$tuple": list(range(1000))}
    yield (
        "a tuple of 1000 numbers in 2000 keys",
        tagged("set", [{"$tuple": [n, row]} for n in range(200)] * 1)[:-2]
        + b',{"$tuple":[0,1]}' * 60_000
        + b"]}",
    )
    yield "an integer of 65 bits as key", tagged("dict", [2**64, 1])
    yield "a signalling NaN as key", tagged("set", [{"$decimal": "sNaN"}])
    deep: object = 1
    for _ in range(9):
        deep = {"$frozenset": [deep]}
    yield "frozensets in each other", json.dumps(deep, separators=(",", ":")).encode()


def odd_parts() -> Iterator[tuple[str, bytes]]:
    """Known types with arguments that their constructors would accept or fail on."""
    for text in (
        "2024-01-01T24:00:00", "2024-13-01T00:00:00", "2024-01-01T00:00:00.9999999", "2024-01-01 00:00:00",
        "2024-01-01T00:00:00Z", "2024-01-01T00:00:00+00:00", "20240101T000000", "2024-W01-1T00:00:00", "",
        "2024-01-01T00:00:60", "1" * 100_000, "٢٠٢٤-01-01T00:00:00",
    ):  # fmt: skip
        yield f"datetime {text[:40]!r}", tagged("datetime", text)
    yield "datetime with fold 2", tagged("datetime", ["2024-01-01T00:00:00", 2, None])
    yield "datetime with a true fold", tagged("datetime", ["2024-01-01T00:00:00", True, None])
    yield "time at hour 99", tagged("time", "99:00:00")
    yield "date in month 77", tagged("date", "2024-77-01")
    yield "date of a datetime", tagged("date", "2024-01-01T00:00:00")
    yield "time zone of a text", tagged("timezone", ["x"])
    yield "time zone of a day", tagged("timezone", [24 * 3600 * 10**6])
    yield "time zone of 1e18", tagged("timezone", [10**18])
    yield "time zone with a long name", tagged("timezone", [1, "x" * 200])
    for name in (
        "../../etc/passwd", "/etc/passwd", "America", "leapseconds", "Mars/Olympus", "UTC/../UTC",
        "utc\u0000", "posixrules/..", ".", "",
    ):  # fmt: skip
        yield f"zone {name!r}", tagged("zone", name)
    yield "a path of 10,000 characters", tagged("path", "x/" * 5000)
    yield "a path of numbers", tagged("path", [1])
    yield "Decimal that is tiny", tagged("decimal", "1E-500")
    yield "Decimal with blanks", tagged("decimal", " 1 ")
    yield "Fraction of floats", tagged("fraction", [1.0, 2.0])
    yield "Fraction of truths", tagged("fraction", [True, 2])
    yield "Fraction of three", tagged("fraction", [1, 2, 3])
    yield "complex of texts", tagged("complex", ["9" * 200, "1"])
    yield "complex of integers", tagged("complex", [1, 2])
    yield "float of a number's text", tagged("float", "1.5")
    yield "float of infinity in words", tagged("float", "infinity")
    yield "bytes of no base64", tagged("bytes", "a*b=")
    yield "bytes without padding", tagged("bytes", "YQ")
    yield "bytes with a line feed", tagged("bytes", "YQ==\n")
    yield "bytes with padding inside", tagged("bytes", "YQ==YQ==")
    yield "UUID with braces", tagged("uuid", "{00000000-0000-0000-0000-000000000000}")
    yield "UUID in capitals", tagged("uuid", "A" * 32)
    yield "UUID of 33 digits", tagged("uuid", "0" * 33)
    yield "ordered pairs of a list", tagged("ordered", [[1, 2], 3, 4, 5])


def broken() -> Iterator[tuple[str, bytes]]:
    """Texts that almost follow the grammar."""
    for text in (
        b"", b" ", b"1 ", b" 1", b"[1, 2]", b"[1,]", b"[,1]", b"[1", b"1]", b"{", b'{"a"', b'{"a":',
        b'{"a":1', b'{"a":1,', b'{"a":1,}', b'{"a" :1}', b"{1:1}", b"{a:1}", b"'a'", b'"a', b'"a\\"',
        b'"\\x41"', b'"\\u12"', b'"a\nb"', b'"a\x00b"', b'"\x1f"', b"nul", b"True", b"None", b"truefalse",
        b"1 2", b"1,2", b"01", b"+1",
        b".5", b"5.", b"1e", b"0x1", b"--1", b"1__0", b"[1}", b'{"a":1]', b'{"$tuple":[1]', b'{"$tuple"}',
        b"\xef\xbb\xbf1", b"[1]//", b"/**/1", b"\x801", b"undefined", b"[1][2]", b'"a""b"', b"[1,2,3,4,5,]",
        b"[1,2,3,4,05]", b'["a","b","c","d",]', b"[null,null,null,nul]",
    ):  # fmt: skip
        yield f"text {text!r}", text
    yield "bytes of all kinds", bytes(range(256))


@functools.cache
def corpus() -> list[tuple[str, bytes]]:
    """All hostile texts."""
    return [*calls(), *wrong_values(), *bombs(), *crafted_keys(), *odd_parts(), *broken()]
