"""Logs of a command's own process: errors to stderr, everything with ``--debug``."""

from __future__ import annotations

import logging

__all__ = ["configure_logs"]


def configure_logs(*, debug: bool) -> None:
    """Send our loggers and the standard library's to stderr, at one level."""
    from nekro_agent.core.logger import configure

    level = "DEBUG" if debug else "ERROR"
    configure(level=level)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
