"""Shared by all loops that renew a lease or poll for work: they survive errors and report a loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

from nekro_agent.errors import NekroError
from runtime.metrics import metrics

__all__ = ["report_loss", "survived"]


@contextmanager
def survived(event: str, **fields: object) -> Iterator[None]:
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


def report_loss(lease: str, **fields: object) -> None:
    """Count and log a lease that passed to another process while this process used it.

    Args:
        lease: its kind, as in the metric ``nekro_leases_lost_total``.
    """
    metrics().leases_lost.labels(lease).inc()
    logger.bind(lease=lease, **fields).error("lease_lost")
