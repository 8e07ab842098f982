"""``dataclass`` with methods that are compiled when a class is used for the first time.

``dataclasses.dataclass`` compiles the texts of six methods of each class, half a millisecond in CPython 3.11.
A worker defines 150 such classes before its first call and uses a part of them; a command uses fewer.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable
from dataclasses import Field, FrozenInstanceError
from typing import TYPE_CHECKING, Any, Final

__all__ = ["dataclass"]

_OPTIONS: Final = {"frozen": True, "kw_only": True}
#: Replaced by the compiled ones. Methods of a frozen class that refuse changes need no compiler.
_COMPILED: Final = ("__init__", "__repr__", "__eq__", "__hash__")
_METHODS: Final = frozenset({*_COMPILED, "__setattr__", "__delattr__"})
#: What ``dataclasses`` reads of a class; the first is present when the class is complete.
_FIELDS: Final = "__dataclass_fields__"
_PARAMETERS: Final = "__dataclass_params__"
#: ``__replace__`` is set by Python 3.13 and newer.
_OTHERS: Final = ("__replace__", "__match_args__")

_lock: Final = threading.RLock()

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """As ``dataclasses.dataclass``; only a frozen class of keyword-only fields is completed later."""
        if options != _OPTIONS:
            return dataclasses.dataclass(cls, **options)
        return _complete_later


def _complete_later(cls: type) -> type:
    if not _METHODS.isdisjoint(cls.__dict__):
        return dataclasses.dataclass(**_OPTIONS)(cls)
    for name in _COMPILED:
        setattr(cls, name, _stub(cls, name))
    _refuse_changes(cls)
    for name in (_FIELDS, _PARAMETERS):
        setattr(cls, name, _Completing(cls, name))
    return cls


def _stub(cls: type, name: str) -> Callable[..., Any]:
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        _complete(cls)
        return cls.__dict__[name](self, *args, **kwargs)

    return method


class _Completing:
    """An attribute that completes its class when it is read."""

    def __init__(self, cls: type, name: str) -> None:
        self._cls, self._name = cls, name

    def __get__(self, instance: object, owner: type) -> Any:
        _complete(self._cls)
        return self._cls.__dict__[self._name]


def _refuse_changes(cls: Any) -> None:
    def refuse(self: object, verb: str, name: str) -> None:
        if type(self) is cls or name in getattr(cls, _FIELDS):
            raise FrozenInstanceError(f"cannot {verb} field {name!r}")

    def __setattr__(self: object, name: str, value: object) -> None:
        refuse(self, "assign to", name)
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:
        refuse(self, "delete", name)
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__


def _complete(cls: type) -> None:
    """Compile the methods, on another class: threads may use this one while its methods are replaced."""
    with _lock:
        if isinstance(cls.__dict__[_FIELDS], dict):
            return
        whole: type = dataclasses.dataclass(**_OPTIONS)(_model_of(cls))
        for name, default in [*cls.__dict__.items()]:
            if isinstance(default, Field):
                if default.default is dataclasses.MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, default.default)
        known = [name for name in _OTHERS if name in whole.__dict__ and name not in cls.__dict__]
        for name in (*_COMPILED, *known, _PARAMETERS, _FIELDS):
            setattr(cls, name, whole.__dict__[name])


def _model_of(cls: type) -> type:
    """Return a class without bases that has the fields of ``cls``, inherited ones included."""
    fields: dict[str, Any] = {}
    types: dict[str, Any] = {}
    for base in cls.__mro__[:0:-1]:
        if dataclasses.is_dataclass(base):
            own = {field.name: field for field in dataclasses.fields(base)}
            fields |= own
            types |= {name: field.type for name, field in own.items()}
    declared = inspect.get_annotations(cls)
    for name in declared:
        fields.pop(name, None)
    fields |= {name: cls.__dict__[name] for name in declared if name in cls.__dict__}
    if hasattr(cls, "__post_init__"):
        fields["__post_init__"] = cls.__post_init__
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__ or " "}
    return type(cls.__name__, (), {**names, **fields, "__annotations__": types | declared})
