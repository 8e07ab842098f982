"""Logs of a command's own process: errors to stderr, everything with ``--debug``."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure_logs"]

_TEXT = "{time:HH:mm:ss.SSS} {level:<7} {name}: {message}"


def configure_logs(*, debug: bool) -> None:
    """Send loguru and the standard library's loggers to stderr, at one level."""
    from loguru import logger

    logger.remove()
    level = "DEBUG" if debug else "ERROR"
    logger.add(sys.stderr, level=level, format=_TEXT, backtrace=False, diagnose=False)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
