"""Values that cross between sandbox and worker, their decoded forms, and the errors for the others."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import importlib
import importlib.util
import io
import ipaddress
import itertools
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import celery
import httpx
import kombu
import pydantic
import pytest
import redis
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from waiting import WAIT_SECONDS

from broker_config.settings import SecuritySettings, Settings
from nekro.sandbox.guest.values import Opaque, open_value
from nekro.wire import returned_types
from nekro.wire.invocation import Signer
from nekro.wire.tagged import write_text
from nekro.wire.values import decode_arguments, decode_value, encode_arguments, encode_value
from nekro_agent.config import ConfigBase
from nekro_agent.errors import ArgumentError, ResultError
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx

MIB = 1 << 20
TESTS = Path(__file__).parent
#: Without a time zone database the machine has no other zones.
HAS_ZONES = "Asia/Tokyo" in zoneinfo.available_timezones()
TOKYO = zoneinfo.ZoneInfo("Asia/Tokyo") if HAS_ZONES else dt.timezone(dt.timedelta(hours=9))


class Colour(enum.Enum):
    RED = "red"
    BOTH = ("red", "blue")


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    colour: Colour = Colour.RED
    more: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Cell:
    x: int


class Page(pydantic.BaseModel):
    url: pydantic.AnyUrl = pydantic.AnyUrl("http://example.org/")
    points: list[Point] = []
    next: Page | None = None
    hidden: Any = pydantic.Field(None, exclude=True)
    anything: Any = None


class Extra(pydantic.BaseModel, extra="allow"):
    pass


class Unwilling(pydantic.BaseModel):
    @pydantic.model_serializer
    def refuse(self) -> dict[str, Any]:
        raise RuntimeError("no")


class Tag(str):
    pass


class Row(dict[str, Any]):
    pass


Pair = collections.namedtuple("Pair", "left right")


class Box:
    """A class that only the plugin can import."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Base(sqlalchemy.orm.DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "note"
    id: sqlalchemy.orm.Mapped[int] = sqlalchemy.orm.mapped_column(primary_key=True)


class Slotted:
    __slots__ = ("inside",)

    def __init__(self, inside: Any) -> None:
        self.inside = inside


def crossed(value: Any) -> Any:
    """A method's return value as sandboxed code receives it."""
    return open_value(encode_value(value, max_bytes=MIB))


def refusal(value: Any) -> str:
    """The error for a value that cannot be returned."""
    with pytest.raises(ResultError) as caught:
        encode_value(value, max_bytes=MIB)
    return str(caught.value)


def unreadable(value: Any) -> str:
    """The error for an argument that sandboxed code sends."""
    with pytest.raises(ArgumentError) as caught:
        decode_arguments(encode_arguments((value,), {}), max_bytes=8 * MIB)
    return str(caught.value)


# Sandbox to worker.


def test_paths_arrive_as_text_and_ordered_dicts_as_dicts() -> None:
    data = encode_arguments((PurePosixPath("/app/x"), Path("a/b")), {"o": collections.OrderedDict(a=1)})
    args, kwargs = decode_arguments(data, max_bytes=MIB)
    assert args == ("/app/x", "a/b")
    assert kwargs == {"o": {"a": 1}}
    assert [type(value) for value in (*args, *kwargs.values())] == [str, str, dict]


@pytest.mark.parametrize(
    "value",
    [
        dt.datetime(2024, 1, 1, 9, tzinfo=TOKYO),
        dt.datetime(2024, 10, 27, 2, 30, fold=1),
        dt.time(2, 30, fold=1, tzinfo=dt.timezone(dt.timedelta(hours=-3), "BRT")),
        2**4095,
        -(2**4095),
        Decimal("-Infinity"),
        {1234567890123456789: "a chat platform's id", 2**64 - 1: "a hash"},
        {pair: None for pair in itertools.product(range(-5, 50), repeat=2)},
        {(-1, -1): 1, (-1, -2): 2, (-2, -1): 3, (-2, -2): 4},
        set(range(5000)),
        {frozenset({1, 2}), frozenset({("a", 1)})},
        [{"name": "x" * 50, "tags": ("a", "b")}] * 1000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_unusual_but_plain_arguments_arrive(value: Any) -> None:
    args, _ = decode_arguments(encode_arguments((value,), {}), max_bytes=MIB)
    assert args == (value,)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Point(1), "type test_codec.Point cannot cross the sandbox boundary; send plain values"),
        (Colour.RED, "type test_codec.Colour cannot cross the sandbox boundary"),
        (Tag("x"), "type test_codec.Tag cannot cross"),
        (collections.defaultdict(list), "type collections.defaultdict cannot cross"),
        (object(), "type object cannot cross"),
        (dt.date, "type type cannot cross the sandbox boundary; send plain values"),
        (print, "type builtin_function_or_method cannot cross"),
        (2**4096, "an integer of more than 4096 bits cannot cross"),
        (Decimal("1e500"), "this decimal cannot cross the sandbox boundary: an exponent beyond 400"),
        ("\ud800", "a string is not valid Unicode"),
        ({2**64: 1}, "an integer of more than 64 bits cannot be a key or a member of a set"),
        (set(range(20_000)), "more than 10000 dict keys and set members that are not strings; send a list"),
        ([None] * 200_001, "the value takes more than 200000 steps to read; send less"),
    ],
)
def test_unsupported_arguments_are_named(value: Any, words: str) -> None:
    assert words in unreadable(value)


def test_names_in_errors_are_short_and_printable() -> None:
    message = malformed(json.dumps({"$\x1b[2J" + "x" * 200: 1}, separators=(",", ":")))
    assert message.isprintable()
    assert len(message) < 250
    strange = type("\x1b[2J" + "x" * 200, (), {})()
    with pytest.raises(ArgumentError) as caught:
        encode_arguments((strange,), {})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def malformed(text: str) -> str:
    with pytest.raises(ArgumentError) as caught:
        decode_arguments(text, max_bytes=MIB)
    return str(caught.value)


def test_deep_arguments_are_refused_at_the_limit() -> None:
    value: Any = 1
    for _ in range(60):
        value = [value]
    decode_arguments(encode_arguments((value,), {}), max_bytes=MIB)
    for _ in range(10):
        value = {"deeper": value}
    assert "nested deeper than 64 levels" in unreadable(value)
    assert "nested deeper than 64 levels" in malformed("[[" + "[" * 70 + "]" * 70 + "],{}]")


@pytest.mark.parametrize(
    "shape", [None, [], [[], {}, {}], ([], {}), [(), {}], [[], []], [[], {1: 2}], [[], {"a": 1, None: 2}]]
)
def test_arguments_are_a_tuple_and_a_dict_of_names(shape: Any) -> None:
    assert "positional and named arguments" in malformed(write_text(shape, 100))


def test_large_arguments_name_size_limit_and_setting() -> None:
    data = encode_arguments(("x" * 2000,), {})
    with pytest.raises(
        ArgumentError, match=rf"{len(data)} bytes.*at most 1024.*the limit of a call's arguments"
    ):
        decode_arguments(data, max_bytes=1024)


@pytest.mark.parametrize("argument", [lambda: None, Point(1), threading.Lock()])
def test_a_caller_gets_an_error_for_arguments_that_a_worker_would_refuse(argument: Any) -> None:
    with pytest.raises(ArgumentError, match="cannot"):
        encode_arguments((argument,), {})


@pytest.mark.extended
def test_a_hostile_corpus_is_refused_with_little_memory_and_time() -> None:
    """In a process with its own limits, which end a decoder that fills memory or hangs."""
    code = """
import resource
from hostile_texts import corpus
from nekro.wire.budget import DecodeBudget
from nekro.wire.parser import load
from nekro.wire.values import arguments_text
from nekro_agent.errors import ArgumentError
texts = corpus()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
refused = 0
for name, data in texts:
    try:
        load(arguments_text(data), DecodeBudget())
    except ArgumentError:
        refused += 1
print(refused, len(texts))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parents[1])])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    refused, total = map(int, done.stdout.split())
    assert refused == total


@pytest.mark.extended
def test_fuzzing_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "fuzz_codec.py"), "--inputs", "5000", "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"5000 inputs, \d+ accepted, no finding", done.stdout)


# Worker to sandbox.


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        [1, {"a": (1.5, b"x")}],
        dt.datetime(2024, 1, 1, tzinfo=TOKYO),
        Fraction(1, 3),
        Path("/app/shared/x"),
        ipaddress.ip_address("192.0.2.1"),
        collections.Counter("aab"),
        collections.OrderedDict(b=1, a=2),
        collections.deque([1, 2], maxlen=3),
        re.compile("a+"),
        {"function": len, "type": int},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_the_standard_library_arrive_equal(value: Any) -> None:
    result = crossed(value)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Colour.BOTH, ("red", "blue")),
        (Level.HIGH, 3),
        ({Colour.RED: [Level.HIGH]}, {"red": [3]}),
        (
            Point(1, more=[Point(2)]),
            {"x": 1, "colour": "red", "more": [{"x": 2, "colour": "red", "more": []}]},
        ),
        (
            Page(points=[Point(1)], hidden=AgentCtx.for_call(chat_key="c")),
            {
                "url": "http://example.org/",
                "points": [{"x": 1, "colour": "red", "more": []}],
                "next": None,
                "anything": None,
            },
        ),
        (Extra(more=Colour.RED), {"more": "red"}),
        (pydantic.RootModel[list[int]]([1]), [1]),
        (Tag("x"), "x"),
        ([Row(a=Tag("x"))], [{"a": "x"}]),
        (Pair(1, Colour.RED), (1, "red")),
        (frozenset({Colour.RED}), frozenset({"red"})),
        ({Cell(1)}, [{"x": 1}]),
        (collections.defaultdict(lambda: Colour.RED, a=Colour.RED), {"a": "red"}),
        (collections.OrderedDict(a=Cell(1)), collections.OrderedDict(a={"x": 1})),
        (collections.Counter({Colour.RED: 2}), collections.Counter(red=2)),
        (collections.deque([Level.HIGH], maxlen=2), collections.deque([3], maxlen=2)),
        ({"a": 1}.keys(), ["a"]),
        ({"d": {"a": 1}.values()}, {"d": [1]}),
        ((1, Tag("x"), Path("x")), (1, "x", Path("x"))),
    ],
)
def test_models_dataclasses_and_enum_members_become_plain_values(value: Any, plain: Any) -> None:
    result = crossed(value)
    assert result == plain
    assert type(result) is type(plain)


def test_rows_of_a_database_become_tuples_and_dicts() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection:
        row = connection.execute(sqlalchemy.text("select 1 as a, 'x' as b")).one()
    engine.dispose()
    assert crossed([row, row._mapping]) == [(1, "x"), {"a": 1, "b": "x"}]


def test_an_unknown_class_arrives_with_its_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encode_value({"box": Box(a=1, inner=[Box(b=2)])}, max_bytes=MIB)
    monkeypatch.setitem(sys.modules, __name__, None)
    box = open_value(data)["box"]
    assert isinstance(box, Opaque)
    assert vars(box)["a"] == 1
    assert vars(box)["inner"][0].b == 2
    with pytest.raises(ArgumentError, match=r"can be opened in a sandbox only: type test_codec.Box cannot"):
        decode_value(data, max_bytes=MIB)


def test_cycles_are_kept_and_shared_values_are_duplicated() -> None:
    shared = [Colour.RED]
    assert crossed([shared, shared]) == [["red"], ["red"]]
    ring: list[Any] = [Colour.RED]
    ring.append(ring)
    copy = crossed(ring)
    assert copy[0] == "red"
    assert copy[1] is copy


def test_a_large_shared_value_is_duplicated_within_the_size_limit() -> None:
    row = "x" * 600_000
    first, *others = crossed([row] * 20)
    assert first == row and all(other is first for other in others), "as a pickle, which keeps it once"
    assert decode_value(encode_value([row] * 20, max_bytes=32 * MIB), max_bytes=32 * MIB) == [row] * 20


@pytest.mark.parametrize("value", ["a\ud800", Path("a\udcff"), 2**5000, [[[]] * 3] * 3])
def test_unusual_return_values_arrive(value: Any) -> None:
    assert crossed(value) == value


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "AgentCtx": (lambda: AgentCtx.for_call(chat_key="c"), "the context of a call"),
    "NekroPlugin": (
        lambda: NekroPlugin(name="n", module_name="m", description="", version="1", author="a", url=""),
        "a plugin",
    ),
    "ConfigBase": (ConfigBase, "settings"),
    "Settings": (lambda: Settings(), "settings"),
    "SecuritySettings": (SecuritySettings, "settings"),
    "Signer": (lambda: Signer.from_text("k"), "a secret"),
    "SecretStr": (lambda: pydantic.SecretStr("hunter2"), "a secret"),
    "Secret": (lambda: pydantic.Secret[int](7), "a secret"),
    "_Environ": (lambda: os.environ, "environment"),
    "Engine": (lambda: sqlalchemy.create_engine("sqlite://"), "database"),
    "AsyncEngine": (lambda: create_async_engine("sqlite+aiosqlite://"), "database"),
    "Session": (sqlalchemy.orm.Session, "database"),
    "async_sessionmaker": (async_sessionmaker, "database"),
    "URL": (lambda: sqlalchemy.make_url("postgresql://u:hunter2@h/d"), "password"),
    "Celery": (lambda: celery.Celery(set_as_current=False), "broker"),
    "Connection": (lambda: kombu.Connection("redis://:hunter2@h"), "broker"),
    "Redis": (lambda: redis.Redis(), "broker"),
    "Response": (lambda: httpx.Response(200, request=httpx.Request("GET", "http://h")), "HTTP"),
    "module": (lambda: os, "a module"),
    "generator": (lambda: (x for x in "a"), "return a list of its items"),
}


@pytest.mark.parametrize(("name", "make", "words"), [(name, *case) for name, case in KEPT.items()])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda kept: kept, "value"),
        (lambda kept: {"rows": [1, kept]}, "value['rows'][1]"),
        (lambda kept: (Colour.RED, Box(a=Slotted(kept))), "value[1].a.inside"),
        (lambda kept: Page(anything={"k": kept}), "value.anything['k']"),
        (lambda kept: Point(1, more=[kept]), "value.more[0]"),
    ],
    ids=["bare", "in containers", "in a foreign object", "in a model", "in a dataclass"],
)
def test_values_bound_to_the_worker_are_refused_at_any_depth(
    name: str, make: Callable[[], Any], words: str, wrap: Callable[[Any], Any], path: str
) -> None:
    message = refusal(wrap(make()))
    assert message.startswith(f"{path} ({name}) cannot leave the worker: ")
    assert words in message
    assert "hunter2" not in message


def test_open_files_and_connections_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as file:
        assert "value[0] (TextIOWrapper) cannot leave the worker: it is an open file" in refusal([file])
    connection = sqlite3.connect(":memory:")
    assert "it is a handle of the database; return its rows" in refusal(connection)
    connection.close()
    assert crossed([io.BytesIO(b"x")])[0].getvalue() == b"x"


def test_a_missing_await_is_suggested() -> None:
    async def answer() -> int:
        return 1

    coroutine = answer()
    assert "was an `await` forgotten?" in refusal({"answer": coroutine})
    coroutine.close()


def test_rows_bound_to_a_session_are_refused() -> None:
    assert "bound to a database session; return the fields" in refusal([Note(id=1)])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([crossed], "value[0] (function) cannot leave the worker: a function is not a value"),
        ({"model": Page}, "value['model'] (class Page) cannot leave the worker: a class is not a value"),
        ({"a": threading.Lock()}, "value['a'] (lock) cannot be pickled: cannot pickle '_thread.lock' object"),
        (Box(a=Box(lock=threading.Lock())), "value.a.lock (lock) cannot be pickled"),
        ([1, type("Local", (), {})()], "value[1] (class Local) cannot be pickled"),
        ([socket.AF_INET, Unwilling()], "value[1] (Unwilling) cannot be returned, its model_dump() fails"),
        ({Cell(1): 2}, "(Cell) cannot be a key: it becomes a dict; use a string"),
    ],
)
def test_an_unsupported_return_value_is_named_with_its_place(value: Any, words: str) -> None:
    assert words in refusal(value)


def test_endless_models_are_refused() -> None:
    page = Page()
    page.next = page
    assert "nested too deeply or contains itself" in refusal(page)


def test_large_values_name_size_limit_setting_and_an_alternative() -> None:
    value = {"image": b"x" * 5000, "colour": Colour.RED}
    size = len(encode_value(value, max_bytes=MIB))
    assert len(encode_value(value, max_bytes=size)) == size
    with pytest.raises(ResultError) as caught:
        encode_value(value, max_bytes=size - 1)
    assert str(caught.value) == (
        f"the value is too large: at most {size - 1} bytes can be returned; "
        "write it to a file and return the file's path"
    )


@pytest.mark.parametrize("name", sorted({*returned_types._KEPT, *returned_types._CASTS}))
def test_classes_matched_by_name_exist_under_that_name(name: str) -> None:
    """If a package renamed one, its instances would no longer be matched."""
    module, _, qualname = name.rpartition(".")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    if module == "builtins":
        return
    assert isinstance(getattr(importlib.import_module(module), qualname), type)
