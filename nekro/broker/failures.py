"""Converts the record of a failed task to an error for its caller.

The record names an exception by module, class and arguments. Celery's own reader imports that
class, or creates one; here a name selects a class of our error tree or stays text. No class
is ever imported or created by a name from the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nekro.broker.celery.names import ERROR_MODULES
from nekro.wire.author_frames import attach, frames_from
from nekro_agent import errors
from nekro_agent.errors import (
    CallCancelledError,
    CallTimeoutError,
    MethodAbortedError,
    MethodFailedError,
    MethodNotFoundError,
    NekroError,
    OutcomeUnknownError,
)

__all__ = ["error_named", "failure_from_record", "name_of"]

#: Longer messages of plugins are truncated.
MAX_MESSAGE_CHARS: Final = 8000
#: Classes of our error tree by name.
_OURS: Final = {
    name: value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, NekroError)
}
#: Exceptions that Celery itself reports about a call.
_CELERYS: Final[Mapping[str, tuple[type[NekroError], str]]] = {
    "NotRegistered": (MethodNotFoundError, "no worker of this lane has the method {detail}"),
    "SoftTimeLimitExceeded": (CallTimeoutError, "the call was stopped at its time limit"),
    "TimeLimitExceeded": (CallTimeoutError, "the call was stopped at its time limit"),
    "WorkerLostError": (OutcomeUnknownError, "the worker died while it ran the call; its outcome is unknown"),
    "Terminated": (CallCancelledError, "the call was cancelled"),
    "Ignore": (MethodAbortedError, "the worker dropped the call"),
    "Reject": (MethodAbortedError, "the worker refused the call"),
}


def failure_from_record(record: Mapping[str, Any]) -> NekroError:
    """Convert the stored record of a task that did not succeed to an error.

    Args:
        record: ``{"status": …, "result": {"exc_type", "exc_message", "exc_module"}, "frames": […], …}``.

    Returns:
        An error of our tree if the worker raised one or Celery reported one about the call, and
        ``MethodFailedError`` for any exception of a plugin. ``author_frames.attached`` returns where in
        the plugin's source it was raised.
    """
    error = _error(record)
    attach(error, frames_from(record.get("frames")))
    return error


def name_of(error: BaseException) -> str:
    """Return the name of an error; ``error_named`` makes one like it from the name.

    A class of a plugin that is called like one of our tree has its module before its name.
    """
    cls = type(error)
    is_foreign = _OURS.get(cls.__name__, cls) is not cls
    return f"{cls.__module__}.{cls.__name__}" if is_foreign else cls.__name__


def error_named(name: str, message: str) -> NekroError:
    """Return the error of our tree with that name, or a ``MethodFailedError`` if there is none."""
    cls = _OURS.get(name)
    return MethodFailedError(name, message) if cls is None else _ours(cls, name, message)


def _error(record: Mapping[str, Any]) -> NekroError:
    result = record.get("result")
    named = result if isinstance(result, Mapping) else {}
    name, module, detail = _unwrapped(named)
    if record.get("status") == "REVOKED":
        return CallCancelledError("the call was cancelled")
    if module in ERROR_MODULES and name in _CELERYS:
        cls, message = _CELERYS[name]
        return cls(message.format(detail=detail))
    if module == errors.__name__ and name in _OURS:
        return _ours(_OURS[name], name, detail)
    return MethodFailedError(name[:200], detail)


def _unwrapped(named: Mapping[str, Any]) -> tuple[str, object, str]:
    """Return name, module and message of an exception; Celery wraps an exception that cannot be pickled."""
    name, arguments = str(named.get("exc_type", "Exception")), named.get("exc_message")
    if name == "UnpickleableExceptionWrapper" and isinstance(arguments, list) and len(arguments) > 2:
        return str(arguments[1]), arguments[0], _text(arguments[2])
    return name, named.get("exc_module"), _text(arguments)


def _ours(cls: type[NekroError], name: str, detail: str) -> NekroError:
    if cls is MethodFailedError:
        error_type, _, message = detail.partition(": ")
        return MethodFailedError(error_type, message)
    try:
        return cls(detail)
    except TypeError:  # its constructor needs more than a message
        return MethodFailedError(name, detail)


def _text(arguments: object) -> str:
    """Return an exception's arguments as ``str`` of the exception would show them."""
    if isinstance(arguments, list | tuple):
        text = str(arguments[0]) if len(arguments) == 1 else ", ".join(map(str, arguments))
    else:
        text = "" if arguments is None else str(arguments)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"
