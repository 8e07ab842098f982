"""Installs the translation of driver errors on an engine."""

from __future__ import annotations

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext

from storage.driver.errors import translated

__all__ = ["install"]


def install(engine: Engine) -> None:
    """Make the engine raise our error, ``from`` the driver's, for every error of its driver."""

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> BaseException | None:
        # None: not a database error (for example a cancellation), which is not translated.
        error = context.sqlalchemy_exception
        return None if error is None else translated(error)
