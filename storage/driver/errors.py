"""Translates errors of SQLAlchemy and the drivers into ours; this is the only place that does.

The engine calls :func:`translated` for every error that a driver raises, while connecting as
well as inside statements, so callers never see a driver's exception class.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Final

from sqlalchemy import Dialect
from sqlalchemy import exc as sa

from nekro_agent.errors import ConflictError, NekroError, StorageError, StorageUnavailableError
from storage.driver.sqlite_driver import is_busy

__all__ = ["is_refusal", "translated", "translated_from_driver"]

#: SQLSTATEs of an undefined table, column and schema.
_SCHEMA_STATES: Final = frozenset({"42P01", "42703", "3F000"})
#: SQLite's error text for the same faults; it has no SQLSTATE.
_SCHEMA_WORDS: Final = re.compile(r"no such (table|column)|has no column named")
#: Prefixes of SQLSTATEs that end a connection.
_ENDING_CLASSES: Final = ("08", "57P")
_UNAVAILABLE: Final = (sa.OperationalError, sa.InterfaceError, sa.InternalError, sa.TimeoutError)


def translated(error: BaseException) -> NekroError:
    """Return our error for an error of SQLAlchemy; raise it ``from`` the driver's error.

    ConflictError for a violated constraint, StorageUnavailableError for a statement that may succeed
    later or after ``nekro db upgrade``, StorageError for the rest: a value or a statement is wrong.
    """
    cause = error.orig if isinstance(error, sa.StatementError) and error.orig is not None else error
    if isinstance(cause, NekroError):
        # A column type refused a value; SQLAlchemy only wrapped the error.
        return cause
    words = _first_line(cause)
    if isinstance(error, sa.IntegrityError):
        return ConflictError(f"the database refused a row: {words}")
    if _is_schema_error(cause):
        return StorageUnavailableError(
            f"the database schema does not match this version ({words}); run `nekro db upgrade`"
        )
    if isinstance(error, _UNAVAILABLE) or getattr(error, "connection_invalidated", False):
        return StorageUnavailableError(f"the database did not run the statement: {words}")
    return StorageError(f"the database refused a statement: {words}")


def translated_from_driver(error: Exception, dialect: Dialect) -> NekroError:
    """Return our error for a driver's error that did not pass through SQLAlchemy."""
    return translated(sa.DBAPIError.instance(None, None, error, dialect.loaded_dbapi.Error, dialect=dialect))


def is_refusal(error: StorageUnavailableError) -> bool:
    """Whether the database itself reported that it did not run the statement; otherwise it may have run.

    After a broken connection or an expired time limit the outcome is unknown.
    """
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return is_busy(cause)
    state = getattr(cause, "sqlstate", None)
    return state is not None and not state.startswith(_ENDING_CLASSES)


def _is_schema_error(cause: BaseException) -> bool:
    if getattr(cause, "sqlstate", None) in _SCHEMA_STATES:
        return True
    return type(cause).__module__ == "sqlite3" and bool(_SCHEMA_WORDS.search(str(cause)))


def _first_line(cause: BaseException) -> str:
    """Return the first line only: PostgreSQL adds values of rows below it, which may be private."""
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
