"""Decides by class how a returned value is converted for the sandbox, or that it must not be returned.

Classes of other packages are identified by name, because importing SQLAlchemy or Celery to compare with
their classes would slow the start of every process that encodes a value. ``path_to`` locates the object
that must not be returned inside the value, for the error message: ``value['rows'][3].session``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from io import BytesIO, StringIO
from pathlib import PosixPath, PurePosixPath
from typing import Any, Final
from uuid import UUID
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo

from pydantic import BaseModel

__all__ = [
    "Shape",
    "Treatment",
    "is_of_standard_library",
    "path_to",
    "treatment_of",
]


class Shape(Enum):
    """How instances of a class are converted."""

    #: Returned unchanged.
    WHOLE = "whole"
    #: A container of the standard library: keeps its class, its items are converted.
    REFILLED = "refilled"
    MODEL = "model"
    DATACLASS = "dataclass"
    MEMBER = "member"
    #: A subclass of a plain type becomes the plain type.
    SUBCLASS = "subclass"
    #: Replaced by the result of a conversion function.
    CAST = "cast"
    #: A class that only the plugin has: returned as it is, and the sandbox shows its attributes.
    FOREIGN = "foreign"
    #: A function or class; may be part of another value's pickle.
    CODE = "code"
    #: Must not leave the worker.
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How the instances of one class are converted."""

    shape: Shape
    #: SUBCLASS: makes the plain type. CAST: the conversion function. Other shapes: None.
    cast: Callable[[Any], Any] | None = None
    #: CODE and KEPT: description for the error message.
    words: str = ""


_CONTEXT = "the context of a call"

_SETTINGS = "a settings object, which may hold keys"

_DATABASE = "a handle of the database; return its rows as plain values"

_BROKER = "a handle of the broker"

_FILE = "an open file; return its path or its content"

_HTTP = "an HTTP exchange with its headers; return its text or its JSON"

_KEPT: Final[dict[str, str]] = {
    "nekro_agent.schemas.agent_ctx.AgentCtx": _CONTEXT,
    "nekro_agent.plugin.NekroPlugin": "a plugin",
    "nekro_agent.config.ConfigBase": _SETTINGS,
    "nekro_agent.runtime.Runtime": "the worker's runtime",
    "broker_config.settings.Settings": _SETTINGS,
    "broker_config.limits.SettingGroup": _SETTINGS,
    "nekro.wire.invocation.Signer": "a secret",
    "nekro.base.redaction.Redactor": "a secret",
    "storage.engine.Database": _DATABASE,
    "pydantic.types._SecretBase": "a secret; return get_secret_value() if the code may see it",
    "pydantic_settings.main.BaseSettings": _SETTINGS,
    "os._Environ": "the worker's environment, which holds keys",
    "sqlalchemy.engine.base.Connection": _DATABASE,
    "sqlalchemy.engine.base.Engine": _DATABASE,
    "sqlalchemy.engine.result.Result": _DATABASE,
    "sqlalchemy.engine.url.URL": "a database address with its password",
    "sqlalchemy.ext.asyncio.engine.AsyncConnectable": _DATABASE,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _DATABASE,
    "sqlalchemy.ext.asyncio.session.async_sessionmaker": _DATABASE,
    "sqlalchemy.orm.scoping.scoped_session": _DATABASE,
    "sqlalchemy.orm.session.Session": _DATABASE,
    "sqlalchemy.orm.session.sessionmaker": _DATABASE,
    "sqlalchemy.orm.state.InstanceState": "bound to a database session; return the fields as plain values",
    "sqlalchemy.pool.base.Pool": _DATABASE,
    "httpx.Request": _HTTP,
    "httpx.Response": _HTTP,
    "requests.models.Request": _HTTP,
    "requests.models.Response": _HTTP,
    "_io._IOBase": _FILE,
    "tempfile._TemporaryFileWrapper": _FILE,
    "tempfile.SpooledTemporaryFile": _FILE,
    "builtins.async_generator": "an async generator; return a list of its items",
    "builtins.coroutine": "a coroutine; was an `await` forgotten?",
    "_asyncio.Future": "a future; was an `await` forgotten?",
    "builtins.generator": "a generator; return a list of its items",
    "builtins.module": "a module",
}
#: Packages all of whose objects are, or contain, handles.
_KEPT_PACKAGES: Final[dict[str, str]] = {
    "aiosqlite": _DATABASE,
    "celery": _BROKER,
    "kombu": _BROKER,
    "psycopg_pool": _DATABASE,
    "redis": _BROKER,
    "sqlite3": _DATABASE,
}

_CASTS: Final[dict[str, Callable[[Any], Any]]] = {
    "builtins.dict_items": list,
    "builtins.dict_keys": list,
    "builtins.dict_values": list,
    # A defaultdict's factory is code, mostly a lambda, which cannot be pickled.
    "collections.defaultdict": dict,
    "numpy.generic": lambda scalar: scalar.item(),
    "pydantic.networks._BaseMultiHostUrl": str,
    "pydantic.networks._BaseUrl": str,
    "sqlalchemy.engine.row.Row": tuple,
    "sqlalchemy.engine.row.RowMapping": dict,
}

_CODE: Final = frozenset({"function", "method", "builtin_function_or_method", "method-wrapper"})

_WHOLE: Final = Treatment(shape=Shape.WHOLE)

_REFILLED: Final = Treatment(shape=Shape.REFILLED)

_WHOLE_TYPES: Final = (
    *(bool, int, float, complex, str, bytes, bytearray, type(None)),
    *(datetime, date, time, timedelta, timezone, ZoneInfo, Decimal, Fraction, UUID),
    *(PosixPath, PurePosixPath, BytesIO, StringIO),
)

_CONTAINER_TYPES: Final = (list, dict, tuple, set, frozenset, deque)
#: Converts an instance of a subclass to its plain type without calling methods that the subclass overrides.
_PLAIN: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda value: bytes(memoryview(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
    dict: lambda value: dict(dict.items(value)),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}

#: Classes that are never unloaded; a plugin's classes are, when the plugin is reloaded.
_permanent: Final[dict[type, Treatment]] = {
    **dict.fromkeys(_WHOLE_TYPES, _WHOLE),
    **dict.fromkeys(_CONTAINER_TYPES, _REFILLED),
}

_known: WeakKeyDictionary[type, Treatment] = WeakKeyDictionary()


def treatment_of(cls: type) -> Treatment:
    """Return how instances of a class are converted."""
    treatment = _permanent.get(cls) or _known.get(cls)
    if treatment is None:
        treatment = _known[cls] = _decide(cls)
    return treatment


def is_of_standard_library(module: object) -> bool:
    """Whether a module name belongs to the standard library, which every sandbox has."""
    return isinstance(module, str) and module.partition(".")[0] in sys.stdlib_module_names


def _decide(cls: type) -> Treatment:
    kept = _kept(cls)
    if kept:
        return Treatment(shape=Shape.KEPT, words=kept)
    if issubclass(cls, type) or cls.__name__ in _CODE:
        return Treatment(shape=Shape.CODE, words="a class" if issubclass(cls, type) else "a function")
    if issubclass(cls, Enum):
        return Treatment(shape=Shape.MEMBER)
    if issubclass(cls, BaseModel):
        return Treatment(shape=Shape.MODEL)
    if is_dataclass(cls):
        return Treatment(shape=Shape.DATACLASS)
    return _undeclared(cls)


def _kept(cls: type) -> str:
    for base in cls.__mro__:
        module = str(getattr(base, "__module__", ""))
        words = _KEPT.get(f"{module}.{base.__qualname__}") or _KEPT_PACKAGES.get(module.partition(".")[0])
        if words:
            return words
    return ""


def _undeclared(cls: type) -> Treatment:
    """Decide for a class that is neither an Enum, a model nor a dataclass."""
    for base in cls.__mro__:
        cast = _CASTS.get(f"{base.__module__}.{base.__qualname__}")
        if cast is not None:
            return Treatment(shape=Shape.CAST, cast=cast)
    if is_of_standard_library(cls.__module__):
        return _REFILLED if issubclass(cls, _CONTAINER_TYPES) else _WHOLE
    for base in cls.__mro__:
        if base in _PLAIN:
            return Treatment(shape=Shape.SUBCLASS, cast=_PLAIN[base])
    return Treatment(shape=Shape.FOREIGN)


_MAX_LOOKED_AT: Final = 100_000

_MAX_KEY_CHARS: Final = 40

_LEAVES: Final = (str, bytes, bytearray, int, float, type(None))


def path_to(wanted: object, value: object) -> str:
    """Return the shortest path, as an expression that begins with ``value``.

    Args:
        wanted: an object inside ``value``, or the class of one.

    Returns:
        ``something in the value`` when it is not found, for instance because pickling created it.
    """
    pending = deque([("value", value)])
    seen: set[int] = set()
    while pending and len(seen) < _MAX_LOOKED_AT:
        path, item = pending.popleft()
        if item is wanted or type(item) is wanted:
            return path
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        pending.extend((path + step, part) for step, part in _parts(item))
    return "something in the value"


def _parts(item: Any) -> Iterator[tuple[str, object]]:
    if isinstance(item, dict):
        for key, part in dict.items(item):
            yield f"[{_shown(key)}]", part
            yield ".keys()", key
    elif isinstance(item, list | tuple | deque):
        for index, part in enumerate(item):
            yield f"[{index}]", part
    elif isinstance(item, set | frozenset):
        for part in item:
            yield "{…}", part
    yield from _attributes(item)


def _attributes(item: Any) -> Iterator[tuple[str, object]]:
    if isinstance(item, type):
        return
    names = list(getattr(item, "__dict__", ()))
    for base in type(item).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        try:
            part = getattr(item, name)
        except Exception:  # noqa: S112 - an attribute that cannot be read cannot be searched
            continue
        yield f".{name}", part


def _shown(key: object) -> str:
    text = repr(key) if isinstance(key, _LEAVES) else type(key).__name__
    return text if len(text) <= _MAX_KEY_CHARS else text[:_MAX_KEY_CHARS] + "…"
