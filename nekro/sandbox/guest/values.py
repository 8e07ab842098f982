"""Decode what enters the sandbox as text: values, and the signatures of stubs.

A missing class is never an error. The worker wrote the text, so the C scanner may parse it; ``nekro.wire``
describes the format.
"""

from __future__ import annotations

from _json import make_scanner
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    import inspect
    from typing import Any

__all__ = [
    "Opaque",
    "open_value",
    "parse_signature",
    "read_json",
]


class Written:
    """A default value that only the worker can evaluate; shown as source text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def parse_signature(text: str) -> inspect.Signature:
    """Parse ``(text: str, times: int = 1) -> str`` into a signature; annotations stay text.

    Raises:
        AttributeError: it has not the form of a ``def``; ``inspect`` then falls back.
    """
    # Imported on demand: most code needs no signature, and `inspect` is slow to import.
    import ast
    import inspect

    try:
        tree = ast.parse(f"def f{text}: pass").body[0]
    except SyntaxError as exc:
        raise AttributeError("__signature__") from exc
    if not isinstance(tree, ast.FunctionDef):
        raise AttributeError("__signature__")
    kinds = inspect.Parameter
    spec = tree.args
    positional: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_ONLY) for arg in spec.posonlyargs]
    positional += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in spec.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    parameters = [
        make_parameter(arg, kind, value)
        for (arg, kind), value in zip(positional, padding + list(spec.defaults), strict=True)
    ]
    if spec.vararg:
        parameters.append(make_parameter(spec.vararg, kinds.VAR_POSITIONAL, None))
    for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parameters.append(make_parameter(arg, kinds.KEYWORD_ONLY, value))
    if spec.kwarg:
        parameters.append(make_parameter(spec.kwarg, kinds.VAR_KEYWORD, None))
    returns = ast.unparse(tree.returns) if tree.returns else inspect.Signature.empty
    return inspect.Signature(parameters, return_annotation=returns)


def make_parameter(arg: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    """Build one parameter."""
    import ast
    import inspect

    value: Any = inspect.Parameter.empty
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except ValueError:
            value = Written(ast.unparse(default))
    annotation = ast.unparse(arg.annotation) if arg.annotation else inspect.Parameter.empty
    return inspect.Parameter(arg.arg, kind, default=value, annotation=annotation)


#: Modules whose classes are the same in every Python.
COMMON_MODULES = frozenset({"builtins", "collections", "copyreg", "datetime", "decimal", "fractions", "uuid"})
#: Beginning of a value that is bytes.
BYTES = '{"$bytes":"'


class Opaque:
    """Stands in for a value whose class cannot be imported here; keeps its state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        self = object.__new__(cls)
        if args:
            self.__dict__["args"] = args
        self.__dict__.update(kwargs)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(key): value for key, value in part.items()})
            elif part is not None:
                self.__dict__["state"] = part

    def append(self, item: Any) -> None:
        """Store an item of a list subclass."""
        self.__dict__.setdefault("items", []).append(item)

    def add(self, item: Any) -> None:
        """Store an item of a set subclass."""
        self.append(item)

    def extend(self, items: Any) -> None:
        """Store items of a list subclass."""
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("mapping", {})[key] = value

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in self.__dict__.items())
        return f"<{type(self).__module__}.{type(self).__qualname__} {fields}>"


class Scanning:
    """The attributes that the C scanner reads."""

    strict = False
    parse_float = float
    parse_int = int
    parse_constant = None
    object_pairs_hook = None

    def __init__(self, object_hook: Any) -> None:
        self.object_hook = object_hook


def read_json(text: str) -> Any:
    """Read JSON text that the host wrote."""
    value, end = scan_json(text, 0)
    if end != len(text):
        raise ValueError("something follows the value")
    return value


def open_value(data: bytes) -> Any:
    """Decode a method's value."""
    text = data.decode()
    if '"$' not in text:
        return read_json(text)
    # A single bytes value: base64 has no escapes, so only its end has to be found.
    if text.startswith(BYTES) and text.find('"', len(BYTES)) == len(text) - 2:
        return open_bytes(text[len(BYTES) : -2])
    value, end = scan_tagged(text, 0)
    if end != len(text):
        raise ValueError("something follows the value")
    return value


def untag(mapping: dict[str, Any]) -> Any:
    """Return the value that an object represents: itself, unless its only key is a tag."""
    if len(mapping) == 1:
        (tag,) = mapping
        if tag[:1] == "$":
            return OPENERS[tag](mapping[tag])
    return mapping


scan_json: Any = make_scanner(Scanning(None))  # type: ignore[arg-type]
scan_tagged: Any = make_scanner(Scanning(untag))  # type: ignore[arg-type]


def open_pairs(parts: list[Any]) -> dict[Any, Any]:
    """Make a dict of alternating keys and values."""
    return dict(zip(parts[::2], parts[1::2]))  # noqa: B905 - written by the host


def open_bytes(text: str) -> bytes:
    """Decode base64."""
    from binascii import a2b_base64

    return a2b_base64(text)


def open_ordered(parts: list[Any]) -> Any:
    """Make an OrderedDict."""
    from collections import OrderedDict

    return OrderedDict(open_pairs(parts))


def open_moment(kind: Any, payload: Any) -> Any:
    """Make a time or datetime."""
    if isinstance(payload, str):
        return kind.fromisoformat(payload)
    text, fold, zone = payload
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def open_datetime(payload: Any) -> Any:
    """Make a datetime."""
    from datetime import datetime

    return open_moment(datetime, payload)


def open_time(payload: Any) -> Any:
    """Make a time of day."""
    from datetime import time

    return open_moment(time, payload)


def open_date(text: str) -> Any:
    """Make a date."""
    from datetime import date

    return date.fromisoformat(text)


def open_timedelta(parts: list[int]) -> Any:
    """Make a timedelta."""
    from datetime import timedelta

    return timedelta(*parts)


def open_timezone(parts: list[Any]) -> Any:
    """Make a fixed offset."""
    from datetime import UTC, timedelta, timezone

    offset, *name = parts
    return timezone(timedelta(microseconds=offset), *name) if offset or name else UTC


def open_zone(name: str) -> Any:
    """Find a zone in the time zone database, which a sandbox may lack."""
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except Exception:
        return type("ZoneInfo", (Opaque,), {"__module__": "zoneinfo", "__qualname__": "ZoneInfo"})(name)


def open_decimal(text: str) -> Any:
    """Make a Decimal."""
    from decimal import Decimal

    return Decimal(text)


def open_fraction(parts: list[int]) -> Any:
    """Make a Fraction."""
    from fractions import Fraction

    return Fraction(*parts)


def open_uuid(text: str) -> Any:
    """Make a UUID."""
    from uuid import UUID

    return UUID(text)


def open_path(text: str) -> Any:
    """Make a path."""
    from pathlib import PosixPath

    return PosixPath(text)


def open_pure_path(text: str) -> Any:
    """Make a pure path."""
    from pathlib import PurePosixPath

    return PurePosixPath(text)


def open_pickle(parts: list[str]) -> Any:
    """Unpickle a value that has no tagged form; a missing class becomes an ``Opaque`` of its name."""
    import io
    from _pickle import Unpickler

    class ValueUnpickler(Unpickler):
        common_only = False

        def find_class(self, module: str, name: str) -> Any:
            if not self.common_only or module in COMMON_MODULES:
                try:
                    return super().find_class(module, name)
                except Exception:  # noqa: S110 - an import may fail in any way; an Opaque is returned
                    pass
            return type(name.rpartition(".")[2], (Opaque,), {"__module__": module, "__qualname__": name})

    data = open_bytes(parts[1])
    try:
        return ValueUnpickler(io.BytesIO(data)).load()
    except Exception:
        # The class exists but does not accept this state (another version): show its parts.
        ValueUnpickler.common_only = True
        return ValueUnpickler(io.BytesIO(data)).load()


OPENERS: dict[str, Any] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": open_pairs,
    "$ordered": open_ordered,
    "$bytes": open_bytes,
    "$bytearray": lambda text: bytearray(open_bytes(text)),
    "$float": float,
    "$complex": lambda parts: complex(*parts),
    "$datetime": open_datetime,
    "$time": open_time,
    "$date": open_date,
    "$timedelta": open_timedelta,
    "$timezone": open_timezone,
    "$zone": open_zone,
    "$decimal": open_decimal,
    "$fraction": open_fraction,
    "$uuid": open_uuid,
    "$path": open_path,
    "$purepath": open_pure_path,
    "$pickle": open_pickle,
}
