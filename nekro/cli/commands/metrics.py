"""`nekro metrics`: print the metrics of the fleet, or serve them to Prometheus."""

from __future__ import annotations

import queue
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nekro.cli.command import Deps, arg, port_number

if TYPE_CHECKING:
    from nekro.app.fleet_metrics import FleetFigures

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro metrics
  nekro metrics --port 9463
  nekro metrics --address 0.0.0.0 --port 9463

Queues, waiting rounds and jobs, workers per lane: metrics that no single worker has. One such process is
enough for a fleet. Each worker serves its own metrics when NEKRO_METRICS__PORT is set. On a loopback address
/metrics needs `Authorization: Bearer` with the text of secrets/monitoring.key of the data directory.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro metrics`."""

    address: str = arg("--address", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port: int | None = arg(
        "--port", type=port_number, help="serve /metrics and /livez there until Ctrl-C (default: print once)"
    )


def run(args: Args, deps: Deps) -> int:
    """Print the metrics, or serve them."""
    from broker_config.embedded import resolve_settings
    from nekro.app.fleet_metrics import FleetFigures
    from nekro.cli.services.ownership import require_running

    settings = deps.load_settings()
    if settings.broker.url is None:
        require_running(settings.data_dir)
    figures = FleetFigures(resolve_settings(settings))
    try:
        if args.port is None:
            deps.output.data(figures.text().decode().rstrip("\n"))
        else:
            _serve(figures, args.address, args.port, settings.data_dir, deps)
    finally:
        figures.close()
    return 0


def _serve(figures: FleetFigures, address: str, port: int, data_dir: Path, deps: Deps) -> None:
    from nekro.app.http_server import PageResponse, PageServer

    reading = threading.Lock()

    def metrics() -> PageResponse:
        with reading:
            return PageResponse(body=figures.text())

    pages = {"/metrics": metrics, "/livez": lambda: PageResponse(body=b"ok\n")}
    server = PageServer.on_port(address, port, pages, data_dir=data_dir, tries=1)
    deps.output.words(f"metrics of the fleet on http://{address}:{server.port}/metrics; Ctrl-C stops")
    # A handler may interrupt `get` or another handler: the lock of an Event would block both.
    stops: queue.SimpleQueue[int] = queue.SimpleQueue()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: stops.put(number)) for number in numbers]
    try:
        stops.get()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        server.close()
