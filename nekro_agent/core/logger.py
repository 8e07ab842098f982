"""The logger of plugins: loguru, whose level and format the application chooses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from loguru import logger

if TYPE_CHECKING:
    from loguru import Logger

__all__ = ["configure", "get_sub_logger", "logger"]

_TEXT_FORMAT = (
    "<green>{time:YYYY-MM-DD HH:mm:ss.SSS}</green> <level>{level: <8}</level> "
    "<cyan>{extra[name]}</cyan> {message}"
)


def configure(*, level: str = "INFO", json_lines: bool = False, sink: TextIO | None = None) -> None:
    """Send all log records to one sink; called once by the application, never at import.

    Args:
        level: lowest level that is written.
        json_lines: one JSON object per line instead of text.
        sink: None means standard error.
    """
    logger.remove()
    logger.configure(extra={"name": "nekro"})
    target = sink if sink is not None else sys.stderr
    if json_lines:
        logger.add(target, level=level, serialize=True, backtrace=False, diagnose=False)
    else:
        # diagnose=False: a traceback must not print the values of variables, secrets among them.
        logger.add(target, level=level, format=_TEXT_FORMAT, backtrace=False, diagnose=False)


def get_sub_logger(name: str, **bind: object) -> Logger:
    """Return a logger whose records carry ``name`` and the fields of ``bind``."""
    return logger.bind(name=name, **bind)
