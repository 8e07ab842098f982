"""Figures of the whole fleet for Prometheus: waiting and running work, workers per lane.

Workers report what they did; only the broker and the database know what no worker has taken yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

from loguru import logger

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.app.budgets import count_exhausted, day_of
from nekro.broker.broker_figures import lane_workers, merge_queues, read_brokers, read_dead
from nekro_agent.errors import NekroError
from nekro_agent.shared_clock import shared_time
from storage.engine import Database, follow_database_clock
from storage.files.content_rows import Totals
from storage.listings.series import OpenDeliveries, OpenWork
from storage.states import BudgetScope

__all__ = ["FLEET_METRICS", "FleetFigures"]

#: Open work, deliveries, used up budgets, and files if they are in a store.
_Figures = tuple[dict[str, OpenWork], OpenDeliveries, dict[BudgetScope, int], Totals | None]

#: How long the answer is cached, since the question costs every worker a message.
_WORKERS_SECONDS: Final = 15.0

#: Name to help text and labels.
FLEET_METRICS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "nekro_up": ("1 when the broker or the database answered the last reading.", ("part",)),
    "nekro_broker_up": (
        "1 when a broker answered the last reading; chats are partitioned over all.",
        ("broker",),
    ),
    "nekro_queue_messages": ("Messages that wait in a lane's queue.", ("lane",)),
    "nekro_queue_held_messages": ("Messages that workers of a lane hold.", ("lane",)),
    "nekro_queue_oldest_seconds": (
        "Age of what waits longest for a worker: a due row in lanes rounds and long, else the next call.",
        ("lane",),
    ),
    "nekro_lane_workers": ("Workers that serve a lane and answer.", ("lane",)),
    "nekro_dead_messages": ("Messages in the dead letter list because no worker can run them.", ()),
    "nekro_rounds_waiting": ("Due rounds that are not running.", ()),
    "nekro_rounds_running": ("Running rounds.", ()),
    "nekro_jobs_waiting": ("Background jobs that are not running yet.", ()),
    "nekro_jobs_running": ("Running background jobs.", ()),
    "nekro_webhook_deliveries_waiting": ("Deliveries to webhooks that were not made yet.", ()),
    "nekro_webhook_deliveries_dead": ("Deliveries to webhooks that are dead letters.", ()),
    "nekro_webhook_oldest_seconds": ("Age of the oldest delivery that waits, also for its next attempt.", ()),
    "nekro_webhook_overdue_seconds": ("How long the oldest due delivery has waited for a gateway.", ()),
    "nekro_approvals_pending": ("Calls that wait for the approval of a person.", ()),
    "nekro_approvals_oldest_seconds": ("Age of the oldest request for approval that is pending.", ()),
    "nekro_budgets_exhausted": (
        "Chats, users and keys whose budget of today is used up; scope day: the whole system.",
        ("scope",),
    ),
    "nekro_file_areas": ("Directories of chats, sandboxes and plugins in the store of files.", ()),
    "nekro_file_names": ("Files and directories in them.", ()),
    "nekro_file_bytes": ("Bytes of the files in them; equal contents count each time.", ()),
    "nekro_file_contents": ("Objects in the store of files.", ()),
    "nekro_file_stored_bytes": ("Bytes of these objects, which also older versions of files need.", ()),
}


class FleetFigures:
    """A Prometheus collector that reads all figures on each collection; blocks for one or two seconds."""

    def __init__(self, settings: Settings) -> None:
        """Take ``settings`` with every URL resolved; connects at the first collection."""
        self._settings = settings
        self._app = create_app(settings)
        self._workers: dict[str, int] = {}
        self._workers_until = 0.0

    def close(self) -> None:
        """Close connections to the broker."""
        self._app.close()

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Any]:
        """Return no metrics: registration must not query the broker or the database."""
        return ()

    def collect(self) -> Iterable[Any]:
        """Read everything; a part that does not answer has ``nekro_up`` 0 and no other figures."""
        from prometheus_client.core import GaugeMetricFamily

        families = {
            name: GaugeMetricFamily(name, text, labels=labels)
            for name, (text, labels) in FLEET_METRICS.items()
        }

        def add(name: str, value: float | None, *labels: str) -> None:
            if value is not None:
                families[name].add_metric(labels, value)

        work, deliveries, exhausted, files = self._read_database() or (None, None, {}, None)
        add("nekro_up", work is not None, "database")
        if deliveries is not None:
            add("nekro_webhook_deliveries_waiting", deliveries.waiting)
            add("nekro_webhook_deliveries_dead", deliveries.dead)
            add("nekro_webhook_oldest_seconds", deliveries.oldest_seconds)
            add("nekro_webhook_overdue_seconds", deliveries.overdue_seconds)
        if files is not None:
            add("nekro_file_areas", files.areas)
            add("nekro_file_names", files.names)
            add("nekro_file_bytes", files.bytes)
            add("nekro_file_contents", files.contents)
            add("nekro_file_stored_bytes", files.stored_bytes)
        for scope, count in exhausted.items():
            add("nekro_budgets_exhausted", count, scope.value)
        oldest: dict[str, float] = {}
        if work is not None:
            for kind, lane in (("rounds", "rounds"), ("jobs", "long")):
                oldest[lane] = work[kind].oldest_seconds
                add(f"nekro_{kind}_waiting", work[kind].waiting)
                add(f"nekro_{kind}_running", work[kind].running)
            add("nekro_approvals_pending", work["approvals"].waiting)
            add("nekro_approvals_oldest_seconds", work["approvals"].oldest_seconds)
        add("nekro_up", self._read_broker(add, oldest), "broker")
        return [family for family in families.values() if family.samples]

    def _read_broker(self, add: Any, oldest: dict[str, float]) -> bool:
        try:
            brokers = read_brokers(self._app)
            for broker in brokers:
                add("nekro_broker_up", broker.queues is not None, broker.name)
            is_first_up = brokers[0].queues is not None  # it has the dead letters, and answers of workers
            dead = read_dead(self._app) if is_first_up else None
            workers = self._lane_workers() if is_first_up else None
        except Exception as exc:  # each transport of kombu raises errors of its own driver
            logger.bind(error=str(exc), error_type=type(exc).__name__).warning("broker_not_readable")
            return False
        for queue in merge_queues(brokers):
            add("nekro_queue_messages", queue.waiting, queue.lane)
            add("nekro_queue_held_messages", queue.held, queue.lane)
            seconds = max(queue.oldest_seconds or 0.0, oldest.get(queue.lane, 0.0))
            add("nekro_queue_oldest_seconds", seconds, queue.lane)
            add("nekro_lane_workers", None if workers is None else workers.get(queue.lane, 0), queue.lane)
        add("nekro_dead_messages", dead)
        return all(broker.queues is not None for broker in brokers)

    def _lane_workers(self) -> dict[str, int]:
        if time.monotonic() >= self._workers_until:
            self._workers = lane_workers(self._app)
            self._workers_until = time.monotonic() + _WORKERS_SECONDS
        return self._workers

    def _read_database(self) -> _Figures | None:
        try:
            return asyncio.run(self._ask_database())
        except NekroError as exc:
            logger.bind(error=str(exc)).warning("database_not_readable")
            return None

    async def _ask_database(self) -> _Figures:
        async with Database(self._settings.database, self._settings.data_dir) as database:
            await follow_database_clock(database)
            async with database.read() as transaction:
                overview = transaction.overview
                work = {
                    "rounds": await overview.rounds(),
                    "jobs": await overview.jobs(),
                    "approvals": await overview.approvals(),
                }
                exhausted = await count_exhausted(
                    transaction, self._settings.budgets, day=day_of(shared_time())
                )
                files = await transaction.contents.totals() if self._settings.files.in_store else None
                return work, await overview.deliveries(), exhausted, files
