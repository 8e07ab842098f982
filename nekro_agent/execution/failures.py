"""Logs what the code of plugins raises; the use of a name that does not exist here is logged once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nekro_agent.errors import PlaceholderUsedError

if TYPE_CHECKING:
    from loguru import Logger

__all__ = ["log_failure", "missing_name"]

#: Most links of a chain of exceptions that are searched.
_MAX_LINKS: Final = 20
#: Events that were logged, with plugin and error.
_logged: Final[set[tuple[str, str, str]]] = set()


def missing_name(exc: BaseException | None) -> PlaceholderUsedError | None:
    """Return the use of a placeholder that an exception is, or that a plugin has translated into it."""
    for _ in range(_MAX_LINKS):
        if exc is None or isinstance(exc, PlaceholderUsedError):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


def log_failure(
    log: Logger, event: str, exc: BaseException, *, plugin_key: str, level: str = "ERROR"
) -> None:
    """Log an exception of a plugin's code with its traceback.

    A name that does not exist here is known from ``nekro plugins`` and does not appear by waiting: its use is
    one warning for each plugin and event in a process, without a traceback.

    Args:
        log: bound to the fields of the event.
        level: of another exception.
    """
    missing = missing_name(exc)
    if missing is None:
        log.opt(exception=exc).log(level, event)
        return
    key = (event, plugin_key, str(missing))
    if key not in _logged:
        _logged.add(key)
        log.bind(error=str(missing)).warning(event)
