"""Translates the drivers' errors into ours; this is the only place that does.

The connections call :func:`translated` for every error of their driver, and :func:`install` does so for an
engine of SQLAlchemy, so callers never see a driver's exception class. :func:`outlasting` repeats what plugins
ask of the database while it does not answer for a short time."""

from __future__ import annotations

import asyncio
import functools
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from nekro_agent.durations import GRACE_SECONDS, RETRY_SECONDS
from nekro_agent.errors import ConflictError, NekroError, StorageError, StorageUnavailableError

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.engine import ExceptionContext

__all__ = [
    "NotBegunError",
    "install",
    "is_busy",
    "is_refusal",
    "outlasting",
    "translated",
]


#: Mask of the primary result code in SQLite's extended result codes.
_PRIMARY_CODE: Final = 0xFF
#: SQLSTATEs of an undefined table, column and schema.
_SCHEMA_STATES: Final = frozenset({"42P01", "42703", "3F000"})
#: SQLite's error text for the same faults; it has no SQLSTATE.
_SCHEMA_WORDS: Final = re.compile(r"no such (table|column)|has no column named")
#: Prefixes of SQLSTATEs that end a connection. A pooler reports most of its own errors as 08P01: both that no
#: server was free for a statement and that the server ended while it ran the statement.
_ENDING_CLASSES: Final = ("08", "57P")
#: SQLSTATE of a server that accepts no connection yet; a pooler passes it on for a statement that waited.
_NOT_CONNECTED: Final = "57P03"

_UNAVAILABLE: Final = frozenset({"OperationalError", "InterfaceError", "InternalError"})


class NotBegunError(Exception):
    """Cause of our error when a transaction could not begin, around the driver's: no statement was sent."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__(str(error))
        self.__cause__ = error


def translated(error: BaseException) -> NekroError:
    """Return our error for a driver's error; raise it ``from`` the driver's.

    ConflictError for a violated constraint, StorageUnavailableError for a statement that may succeed
    later or after ``nekro db upgrade``, StorageError for the rest: a value or a statement is wrong.
    """
    if isinstance(error, NekroError):
        # A column type refused a value.
        return error
    words = _first_line(error)
    # Both drivers name their classes as PEP 249 does.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "IntegrityError" in kinds:
        return ConflictError(f"the database refused a row: {words}")
    if _is_schema_error(error):
        return StorageUnavailableError(
            f"the database schema does not match this version ({words}); run `nekro db upgrade`"
        )
    if kinds & _UNAVAILABLE:
        return StorageUnavailableError(f"the database did not run the statement: {words}")
    return StorageError(f"the database refused a statement: {words}")


def install(engine: Engine) -> None:
    """Make an engine raise our error, ``from`` the driver's, for every error of its driver."""
    from sqlalchemy import event

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> BaseException | None:
        # None: not a database error (for example an interrupt), which is not translated.
        return None if context.sqlalchemy_exception is None else translated(context.original_exception)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether a statement was refused because another connection holds a lock."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors raised by the sqlite3 module itself have none
    return code & _PRIMARY_CODE == sqlite3.SQLITE_BUSY


def is_refusal(error: StorageUnavailableError) -> bool:
    """Whether the database itself reported that it did not run the statement; otherwise it may have run.

    After a broken connection or an expired time limit the outcome is unknown, unless BEGIN itself failed.
    """
    cause = error.__cause__
    if isinstance(cause, NotBegunError):
        return True
    if isinstance(cause, sqlite3.Error):
        return is_busy(cause)
    state = getattr(cause, "sqlstate", None)
    return state is not None and (state == _NOT_CONNECTED or not state.startswith(_ENDING_CLASSES))


def _is_schema_error(error: BaseException) -> bool:
    if getattr(error, "sqlstate", None) in _SCHEMA_STATES:
        return True
    return type(error).__module__ == "sqlite3" and bool(_SCHEMA_WORDS.search(str(error)))


def _first_line(error: BaseException) -> str:
    """Return the first line only: PostgreSQL adds values of rows below it, which may be private."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


P = ParamSpec("P")

T = TypeVar("T")


def outlasting(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Repeat an asynchronous function during a short outage of the database.

    The function must be idempotent: it may have been committed although it raised. What it wrote then, it
    finds at the next attempt, so ``set`` of a new key may say that a value was replaced.

    Raises:
        StorageUnavailableError: the outage was longer than a restart or a failover takes.
    """

    @functools.wraps(function)
    async def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
        give_up_at = time.monotonic() + 3 * GRACE_SECONDS
        while True:
            try:
                return await function(*args, **kwargs)
            except StorageUnavailableError:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    return repeated
