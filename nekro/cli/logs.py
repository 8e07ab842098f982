"""Configure the logs of a command's own process: warnings to stderr, everything with ``--debug``."""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["configure_logs"]

#: Loggers whose warnings about plugins only `nekro plugins` prints.
_QUIET: Final = frozenset({"loader", "registry"})


def configure_logs(*, debug: bool) -> None:
    """Send the logs of this package and of the standard library to stderr."""
    from nekro_agent.core.logger import StandardLogs, configure

    level = "DEBUG" if debug else "WARNING"
    configure(level=level, quiet=() if debug else _QUIET)
    # The drivers log every statement at DEBUG.
    logging.basicConfig(level="INFO" if debug else level, handlers=[StandardLogs()])
