"""Values that come into the sandbox: unpickled here, and never an error for a class that is missing."""

from __future__ import annotations

import io
from _pickle import Unpickler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__all__ = ["Opaque", "open_value"]

#: Modules whose classes every Python has, in the same shape.
COMMON_MODULES = frozenset({"builtins", "collections", "copyreg", "datetime", "decimal", "fractions", "uuid"})


class Opaque:
    """Stands in for a value whose class is not importable here; keeps what it carried."""

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
        """Take an item of a list subclass."""
        self.__dict__.setdefault("items", []).append(item)

    def add(self, item: Any) -> None:
        """Take an item of a set subclass."""
        self.append(item)

    def extend(self, items: Any) -> None:
        """Take items of a list subclass."""
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("mapping", {})[key] = value

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in self.__dict__.items())
        return f"<{type(self).__module__}.{type(self).__qualname__} {fields}>"


class ValueUnpickler(Unpickler):
    """Opens a method's value; a class that is missing here becomes an ``Opaque`` of its name."""

    def __init__(self, data: bytes, *, common_only: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._common_only = common_only

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, or a stand-in."""
        if not self._common_only or module in COMMON_MODULES:
            try:
                return super().find_class(module, name)
            except Exception:  # noqa: S110 - an import may fail in any way; the stand-in is the answer
                pass
        return type(name.rpartition(".")[2], (Opaque,), {"__module__": module, "__qualname__": name})


def open_value(data: bytes) -> Any:
    """Unpickle a method's value."""
    try:
        return ValueUnpickler(data, common_only=False).load()
    except Exception:
        # The class is here but cannot take this state (another version): show the parts.
        return ValueUnpickler(data, common_only=True).load()
