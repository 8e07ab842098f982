"""Log an error of one iteration, so that a background loop continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

from nekro_agent.errors import NekroError

__all__ = ["log_errors"]


@contextmanager
def log_errors(event: str, **fields: object) -> Iterator[None]:
    """Log an error of the block and continue: the loop must not end, and its next attempt may succeed.

    Args:
        event: name of the log event.
    """
    try:
        yield
    except NekroError as exc:  # such as a database that does not answer
        logger.bind(error=str(exc), **fields).warning(event)
    except Exception:  # the loop has no caller that would see the error
        logger.bind(**fields).exception(event)
