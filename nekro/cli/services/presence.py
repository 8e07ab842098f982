"""Check that the broker answers and that workers are there; probe the workers of this host.

Probes ask for liveness and readiness; they are the client of ``workers.ops.monitor``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from broker_config.settings import Settings
from broker_config.urls import is_redis, without_password
from nekro.app.processes import broker_id, data_dir_id, monitor_sockets
from nekro.base.tasks import end_tasks
from nekro_agent.durations import PROGRAM_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import BrokerUnavailableError, ServiceError, SettingsError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

    from nekro.app.catalogue import FleetCatalogue

__all__ = [
    "Probe",
    "Wanted",
    "WorkerAnswer",
    "ask_workers",
    "awaited_with_workers",
    "require_broker",
    "require_workers",
    "wanted_of",
]


T = TypeVar("T")

#: Calls that are answered within this time need no inspection of the workers, which takes a second.
_PATIENCE_SECONDS: Final = 2.0
#: Inspections before a lane counts as unserved: a worker that was just started needs some seconds.
_QUESTIONS: Final = 3
#: How long a fleet counts as started while no worker has published; as long as those inspections take.
_PUBLISHED_SECONDS: Final = 10.0


def require_broker(settings: Settings) -> None:
    """Return when the broker answers; code that makes no call would not detect that it is down.

    Raises:
        BrokerUnavailableError: it does not answer in time.
    """
    url = settings.broker.url or ""
    limit = settings.broker.connect_seconds
    try:
        if is_redis(url):
            from broker_config.redis_endpoint import RedisEndpoint

            with RedisEndpoint(settings.broker, url).client() as client:
                client.ping()
            return
        from kombu.connection import Connection

        with Connection(url, connect_timeout=limit) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=limit)
    except SettingsError:
        raise
    except Exception as exc:  # each transport of kombu raises errors of its own driver
        raise BrokerUnavailableError(
            f"broker {without_password(url)} does not answer ({exc}); start it, or correct NEKRO_BROKER__URL"
        ) from exc


async def require_workers(read: Callable[[], Awaitable[FleetCatalogue]]) -> None:
    """Return when a worker is live in the catalogue; one that was just started needs some seconds.

    Args:
        read: reads the catalogue.

    Raises:
        ServiceError: none is.
        StorageUnavailableError: the database does not answer.
    """
    give_up_at = time.monotonic() + _PUBLISHED_SECONDS
    while not (await read()).is_live:
        if time.monotonic() > give_up_at:
            raise ServiceError(_unserved(Lane.METHODS.value))
        await asyncio.sleep(REFRESH_SECONDS)


def _unserved(lane: str) -> str:
    return f"no worker serves lane {lane}; start `nekro worker --lane {lane}` or `nekro up`"


async def awaited_with_workers(work: Awaitable[T], app: Callable[[], Celery], *, lane: str) -> T:
    """Await ``work``, unless no worker serves its lane.

    Raises:
        ServiceError: no worker serves the lane after three inspections; ``work`` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_QUESTIONS):
            done, _ = await asyncio.wait([task], timeout=_PATIENCE_SECONDS)
            if done or lane in await asyncio.to_thread(_served_lanes, app):
                return await task
        raise ServiceError(_unserved(lane))
    finally:
        await end_tasks(task)


def _served_lanes(app: Callable[[], Celery]) -> Iterable[str]:
    from nekro.broker.broker_figures import lane_workers

    return lane_workers(app())


#: Most of a worker's answer that is read.
_ANSWER_BYTES: Final = 1 << 20


class Probe(StrEnum):
    """The question of a probe."""

    #: Whether its event loop runs; a worker whose loop does not must be restarted.
    LIVE = "live"
    #: Whether it takes calls: it has started, has a broker and a database, and is not stopping.
    READY = "ready"


@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """The answer of one worker."""

    lane: str
    worker: str
    pid: int
    ok: bool
    faults: tuple[str, ...] = ()
    #: Names of its data directory and broker; None if the worker did not answer.
    data_dir_id: str | None = None
    broker_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which workers are meant; None means any."""

    lane: str | None = None
    #: With or without ``@<host>``.
    name: str | None = None
    #: From ``nekro.app.processes``, as is the next one.
    data_dir_id: str | None = None
    broker_id: str | None = None

    def fits(self, answer: WorkerAnswer) -> bool:
        """Whether a worker is meant; one that did not say who it is fits only if nothing was asked for."""
        return (
            self.name in (None, answer.worker, answer.worker.partition("@")[0])
            and self.data_dir_id in (None, answer.data_dir_id)
            and self.broker_id in (None, answer.broker_id)
        )


def wanted_of(settings: Settings, *, lane: str | None = None, name: str | None = None) -> Wanted:
    """Return which workers are meant: those of the data directory and of the broker that are set."""
    return Wanted(
        lane=lane,
        name=name,
        data_dir_id=data_dir_id(settings) if settings.is_data_dir_set else None,
        broker_id=broker_id(settings),
    )


def ask_workers(probe: Probe, wanted: Wanted) -> list[WorkerAnswer]:
    """Probe the workers of this user on this host that are meant; ended workers are left out.

    Raises:
        ServiceError: other users can access the directory of the workers' sockets.
    """
    paths = monitor_sockets(wanted.lane)
    # In parallel: each worker that hangs takes the whole timeout.
    with ThreadPoolExecutor(max(1, len(paths))) as pool:
        answers = list(pool.map(lambda path: _ask(path, probe), paths))
    return [answer for answer in answers if answer is not None and wanted.fits(answer)]


def _ask(path: Path, probe: Probe) -> WorkerAnswer | None:
    lane, _, number = path.stem.rpartition(".")
    connection = _Connection(path)
    try:
        connection.request("GET", f"/{probe}z")
        body: dict[str, Any] = json.loads(connection.getresponse().read(_ANSWER_BYTES))
    except (ConnectionRefusedError, FileNotFoundError):
        path.unlink(missing_ok=True)  # left behind by a worker that was killed
        return None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        fault = f"it does not answer ({type(exc).__name__})"
        return WorkerAnswer(lane=lane, worker=path.stem, pid=int(number), ok=False, faults=(fault,))
    finally:
        connection.close()
    return WorkerAnswer(
        lane=body["lane"],
        worker=body["worker"],
        pid=int(number),
        ok=body["ok"],
        faults=tuple(body["faults"]),
        data_dir_id=body.get("data_dir_id"),
        broker_id=body.get("broker_id"),
    )


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("worker", timeout=PROGRAM_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
