"""Checks by a method's parameters whether arguments fit, before they are sent to a worker.

Only number and names are compared: a worker does not refuse a type either, because published plugins rely
on that.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection
from functools import lru_cache
from typing import Final

from nekro.plugins.entries import MethodEntry
from nekro_agent.errors import ArgumentError

__all__ = ["refuse_unfit", "refuse_unfit_text"]

#: Kinds of parameters that take any number of arguments, and no default.
_VARIADIC: Final = ("VAR_POSITIONAL", "VAR_KEYWORD")
#: Longer texts are left to the worker, which parses them in slices.
_MOST_CHARS: Final = 4096


def refuse_unfit(entry: MethodEntry, count: int, names: Collection[str]) -> None:
    """Return if a call with so many positional and these named arguments fits the method.

    Raises:
        ArgumentError: it does not; the text is that of a worker.
    """
    if entry.parameters is not None:
        # Names that the method does not have are the caller's: any number, of any length.
        has_all = _signature(entry).parameters.keys() >= set(names)
        check = _misfit if has_all else _misfit.__wrapped__
        error = check(entry, count, tuple(names))
        if error is not None:
            raise ArgumentError(f"{entry.name}{entry.signature}: {error}")


def refuse_unfit_text(entry: MethodEntry, text: str) -> None:
    """Return if arguments in tagged text fit the method, or the worker has to decide.

    Args:
        text: hostile; only numbers and names are read of it, and only of a short one.

    Raises:
        ArgumentError: they do not fit.
    """
    if len(text) > _MOST_CHARS or entry.parameters is None:
        return
    try:
        args, kwargs = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return  # the worker's parser reports what is malformed
    if isinstance(args, list) and isinstance(kwargs, dict) and not any(name[:1] == "$" for name in kwargs):
        refuse_unfit(entry, len(args), kwargs)


@lru_cache(maxsize=4096)
def _misfit(entry: MethodEntry, count: int, names: tuple[str, ...]) -> str | None:
    given = dict.fromkeys(names)
    if entry.swapped is not None and entry.swapped[0] in given:
        # As in ``nekro_agent.execution.invoke``: the first parameter receives the context.
        given[entry.swapped[1]] = given.pop(entry.swapped[0])
    try:
        # One more: the context.
        _signature(entry).bind(*[None] * (count + 1), **given)
    except TypeError as exc:
        return str(exc)
    return None


@lru_cache(maxsize=4096)
def _signature(entry: MethodEntry) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                inspect._ParameterKind[one.kind],
                default=inspect.Parameter.empty if one.is_required or one.kind in _VARIADIC else None,
            )
            for one in entry.parameters or ()
        ]
    )
