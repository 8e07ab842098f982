"""Logs of a command's own process: warnings to stderr, everything with ``--debug``."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["configure_logs"]

#: What these find wrong with plugins is `nekro plugins`' to say, and not every command's.
_QUIET: Final = frozenset({"loader", "registry"})


def configure_logs(*, debug: bool) -> None:
    """Send our loggers and the standard library's to stderr."""
    from nekro_agent.core.logger import StandardLogs, configure

    level = "DEBUG" if debug else "WARNING"
    configure(level=level, quiet=() if debug else _QUIET)
    # The drivers log every statement at DEBUG.
    logging.basicConfig(level="INFO" if debug else level, handlers=[StandardLogs()])
