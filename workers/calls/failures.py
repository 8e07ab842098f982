"""Prepares a plugin's exception for leaving the worker: adds hints and places, removes secrets."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nekro.base.redaction import Redactor
from nekro_agent.errors import MethodFailedError, NekroError
from nekro_agent.execution.author_frames import AuthorFrame, author_frames, source_folder
from nekro_agent.placeholders import OWN_PACKAGES

__all__ = ["explained", "places_in_plugin", "redacted"]

_PLAIN_TYPES = (int, float, str, bytes, bool, list, dict, tuple, set)


def redacted(exc: Exception, redactor: Redactor) -> Exception:
    """Return ``exc``, or a substitute with redacted text when its chain holds something sensitive.

    Celery stores the traceback of the whole chain, so a secret in the text of a cause counts too.
    Raise a substitute ``from None``.
    """
    if all(redactor(str(link)) == str(link) for link in _chain(exc)):
        return exc
    return MethodFailedError(type(exc).__name__, redactor(str(exc)))


def places_in_plugin(
    exc: Exception, function: Callable[..., Any], redactor: Redactor
) -> tuple[AuthorFrame, ...]:
    """Return the frames of the plugin's own source that an exception of a method passed, innermost last."""
    folder = source_folder(inspect.unwrap(function).__module__)
    return () if folder is None else author_frames(exc, folder, own=OWN_PACKAGES, hide=redactor)


def _chain(exc: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    waiting: list[BaseException | None] = [exc]
    while waiting:
        link = waiting.pop()
        if link is not None and link not in links:
            links.append(link)
            waiting += [link.__cause__, link.__context__]
    return links


def explained(
    exc: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception:
    """Add to an exception which arguments do not have the type that the signature names.

    Types are not enforced, because the reference enforces none and plugins rely on that. The hint
    is added only after the method has failed.
    """
    if isinstance(exc, NekroError) or not isinstance(exc, TypeError | AttributeError | ValueError):
        return exc
    wrong = _mismatches(function, args, kwargs)
    if not wrong:
        return exc
    return MethodFailedError(type(exc).__name__, f"{exc} ({'; '.join(wrong)})")


def _mismatches(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    try:
        bound = inspect.signature(function).bind(None, *args, **kwargs)
        hints = typing.get_type_hints(function)
    except (TypeError, NameError):
        return []
    wrong = []
    for name, value in list(bound.arguments.items())[1:]:
        expected = hints.get(name)
        if expected not in _PLAIN_TYPES or not isinstance(expected, type) or isinstance(value, expected):
            continue
        if expected is float and isinstance(value, int):
            continue
        wrong.append(f"argument {name} is {type(value).__name__}, the signature says {expected.__name__}")
    return wrong
