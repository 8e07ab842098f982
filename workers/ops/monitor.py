"""Serves a worker's state to probes and Prometheus: ``/livez``, ``/readyz`` and ``/metrics``.

The server always listens on a Unix socket, for `nekro worker --check` on the same host or in the same
container, and on a TCP port if ``metrics.port`` is set. It has threads of its own, so a probe can
distinguish a worker that hangs from one that is gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

from loguru import logger

from broker_config.settings import Settings
from nekro.app.ops.http_server import Page, PageServer
from nekro.app.ops.sockets import socket_path
from nekro.base.metrics import start_metrics
from workers.ops.health import Health, Report

__all__ = ["monitored"]


@contextmanager
def monitored(settings: Settings, health: Health, *, lane: str) -> Iterator[None]:
    """Serve this worker's state while the block lasts.

    Raises:
        ServiceError: no port of the configured range is free.
        SettingsError: the key for metrics on loopback cannot be read.
    """
    pages = {"/livez": lambda: _page_of(health.live), "/readyz": lambda: _page_of(health.ready)}
    metrics = settings.metrics
    if metrics.port:
        pages["/metrics"] = _metrics_page
    path = socket_path(lane, os.getpid())
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(PageServer.on_socket(path, pages).close)
        if metrics.port:
            server = PageServer.on_port(metrics.address, metrics.port, pages, data_dir=settings.data_dir)
            stack.callback(server.close)
            logger.bind(address=metrics.address, port=server.port).info("metrics_served")
        yield


def _page_of(check: Callable[[], Report]) -> Page:
    report = check()
    status = HTTPStatus.OK if report.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Page(body=json.dumps(report.as_json()).encode(), type="application/json", status=status)


def _metrics_page() -> Page:
    from prometheus_client import generate_latest

    return Page(body=generate_latest(start_metrics().registry))
