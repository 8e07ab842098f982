"""Logs of a command's own process: warnings to stderr, everything with ``--debug``."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from loguru import Record

__all__ = ["configure_logs"]

_FORMAT: Final = "{time:HH:mm:ss.SSS} {level:<7} {extra[name]}: {message}"
#: What these find wrong with plugins is `nekro plugins`' to say, and not every command's.
_QUIET: Final = frozenset({"loader", "registry"})


def configure_logs(*, debug: bool) -> None:
    """Send our loggers and the standard library's to stderr."""
    from loguru import logger

    def shown(record: Record) -> bool:
        return debug or record["extra"].get("name") not in _QUIET

    logger.remove()
    logger.configure(extra={"name": "nekro"})
    level = "DEBUG" if debug else "WARNING"
    logger.add(sys.stderr, level=level, format=_FORMAT, filter=shown, backtrace=False, diagnose=False)
    # The drivers tell every statement at DEBUG.
    logging.basicConfig(level="INFO" if debug else level, format="%(levelname)s %(name)s: %(message)s")
