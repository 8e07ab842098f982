"""Hooks the translation of driver errors into an engine."""

from __future__ import annotations

from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext

from storage.driver_errors import translated

__all__ = ["install"]


def install(engine: Engine) -> None:
    """Let every error of the engine's driver leave it as one of ours, raised ``from`` the driver's."""

    @event.listens_for(engine, "handle_error")
    def translate(context: ExceptionContext) -> BaseException | None:
        # None: not a database error (a cancellation, say), which passes as it is.
        error = context.sqlalchemy_exception
        return None if error is None else translated(error)
