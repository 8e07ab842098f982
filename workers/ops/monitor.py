"""The state of a worker for probes and Prometheus: ``/livez``, ``/readyz`` and ``/metrics``.

*Live*: its event loop responds. A worker that is not live must be restarted. *Ready*: it is live, its
services have started, it consumes from its broker, its database answers and it was not asked to
stop. A worker that is not ready needs no restart: it is starting, recovering or stopping.

The server always listens on a Unix socket, for `nekro worker --check` on the same host or in the same
container, and on a TCP port if ``metrics.port`` is set. It has threads of its own, so a probe can
distinguish a worker that hangs from one that is gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from loguru import logger

from broker_config.settings import Settings
from nekro.app.http_server import PageResponse, PageServer
from nekro.app.processes import socket_path
from nekro.base.metrics import start_metrics
from nekro_agent.errors import NekroError
from storage.engine import Database

__all__ = [
    "Health",
    "Report",
    "monitored",
]


#: How long a loop may take to respond; far above what the watchdog reports as blocked.
LOOP_SECONDS: Final = 10.0
#: How long the database may take to answer the probe; both fit into a probe's limit in the shipped files.
DATABASE_SECONDS: Final = 3.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a probe; ``faults`` is empty if it passes."""

    lane: str
    worker: str
    faults: tuple[str, ...]
    #: Names of its data directory and broker, from ``nekro.app.processes``.
    ids: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the probe passes."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """The body of the HTTP response."""
        faults = list(self.faults)
        return {"ok": self.ok, "lane": self.lane, "worker": self.worker, "faults": faults, **self.ids}


class Health:
    """Probes of one worker process; call them from any thread but the loop's."""

    def __init__(
        self,
        *,
        lane: str,
        worker: str,
        database: Database,
        ids: Mapping[str, str | None] | None = None,
        loop_seconds: float = LOOP_SECONDS,
    ) -> None:
        self._lane = lane
        self._worker = worker
        self._database = database
        self._ids = ids or {}
        self._loop_seconds = loop_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumes: Callable[[], str | None] = lambda: "the worker is starting"

    def started(self, loop: asyncio.AbstractEventLoop, *, consumes: Callable[[], str | None]) -> None:
        """Record that the services run.

        Args:
            loop: the event loop of the services.
            consumes: returns why no message can be taken now; None if one can.
        """
        self._loop = loop
        self._consumes = consumes

    def live(self) -> Report:
        """Whether the loop responds; a worker that starts or stops counts as live."""
        return self._report(self._loop_fault())

    def ready(self) -> Report:
        """Whether a call would be taken now and could be recorded."""
        if self._loop is None:
            return self._report(self._consumes())
        fault = self._loop_fault()
        return self._report(fault, self._consumes(), None if fault else self._database_fault(self._loop))

    def _loop_fault(self) -> str | None:
        if self._loop is None or self._loop.is_closed():
            return None
        turned = concurrent.futures.Future[None]()
        try:
            self._loop.call_soon_threadsafe(turned.set_result, None)
            turned.result(self._loop_seconds)
        except TimeoutError:
            return f"the event loop has not turned for {self._loop_seconds:g} s"
        except RuntimeError:  # the loop was closed meanwhile: the worker stops
            return None
        return None

    def _database_fault(self, loop: asyncio.AbstractEventLoop) -> str | None:
        asked = asyncio.run_coroutine_threadsafe(self._ask_database(), loop)
        try:
            asked.result(DATABASE_SECONDS)
        except TimeoutError:
            asked.cancel()
            return f"the database has not answered for {DATABASE_SECONDS:.0f} s"
        except NekroError as exc:
            return f"the database does not answer: {exc}"
        return None

    async def _ask_database(self) -> None:
        async with self._database.read() as transaction:
            await transaction.connection.exec_driver_sql("SELECT 1")

    def _report(self, *faults: str | None) -> Report:
        found = tuple(fault for fault in faults if fault)
        return Report(lane=self._lane, worker=self._worker, faults=found, ids=self._ids)


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


def _page_of(check: Callable[[], Report]) -> PageResponse:
    report = check()
    status = HTTPStatus.OK if report.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return PageResponse(body=json.dumps(report.as_json()).encode(), type="application/json", status=status)


def _metrics_page() -> PageResponse:
    from prometheus_client import generate_latest

    return PageResponse(body=generate_latest(start_metrics().registry))
