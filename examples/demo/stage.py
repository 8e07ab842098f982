"""The services of the tour: a Redis, a SQLite database, four workers and a model server, all of its own.

The model server has one file to download, in place of a model repository. Tasks are recorded from Celery's
events.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from celery import Celery

from broker_config.settings import AnswerMode, Settings
from broker_config.urls import LIVE_FILES
from nekro.cli.services.process import ChildProcess, ChildSpec, worker_spec
from nekro.cli.services.system import embedded_services, start_workers, stop_workers
from nekro_agent.durations import POLL_SECONDS, PROGRAM_SECONDS
from nekro_agent.methods import Lane

from .scenes import write_script

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "ModelServer",
    "Stage",
    "TaskLog",
    "TaskRecord",
    "demo_settings",
    "open_stage",
]


@dataclass
class TaskRecord:
    """One task of one method."""

    task_id: str
    name: str
    #: Celery node name, ``<worker name>@<host>``.
    worker: str
    pid: int
    received_at: datetime
    ended_at: datetime | None = None
    failed: bool = False


@dataclass
class TaskLog:
    """Listens in a thread while it is entered."""

    app: Celery
    records: dict[str, TaskRecord] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _listening: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> TaskLog:
        """Start to listen; earlier events are not recorded."""
        self._thread = threading.Thread(target=self._listen, name="task-log", daemon=True)
        self._thread.start()
        self._listening.wait(PROGRAM_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(PROGRAM_SECONDS)

    def of(self, function: str) -> list[TaskRecord]:
        """Return the tasks of one method, by its function name, oldest first."""
        records = [record for record in self.records.values() if record.name.split(".")[-1] == function]
        return sorted(records, key=lambda record: record.received_at)

    def wait_for(self, function: str, *, seconds: float) -> None:
        """Wait until a task of that method is recorded, at most ``seconds``: events arrive in batches."""
        deadline = time.monotonic() + seconds
        while not self.of(function) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _listen(self) -> None:
        with self.app.connection_for_read() as connection:
            receiver = self.app.events.Receiver(
                connection,
                handlers={
                    "task-received": self._received,
                    "task-succeeded": self._ended,
                    "task-failed": self._failed,
                },
            )
            # The receiver reads from a clone of the connection.
            with receiver.consumer_context(wakeup=False) as (reading, *_):
                while not self._stop.is_set():
                    # No event within the timeout is normal.
                    with contextlib.suppress(TimeoutError):
                        reading.drain_events(timeout=POLL_SECONDS)
                    # kombu subscribes when it first reads.
                    self._listening.set()

    def _received(self, event: dict[str, Any]) -> None:
        self.records[event["uuid"]] = TaskRecord(
            task_id=event["uuid"],
            name=event.get("name") or "",
            worker=event["hostname"],
            pid=int(event["pid"]),
            received_at=_time(event),
        )

    def _ended(self, event: dict[str, Any]) -> None:
        record = self.records.get(event["uuid"])
        if record is not None:
            record.ended_at = _time(event)

    def _failed(self, event: dict[str, Any]) -> None:
        self._ended(event)
        record = self.records.get(event["uuid"])
        if record is not None:
            record.failed = True


def _time(event: dict[str, Any]) -> datetime:
    return datetime.fromtimestamp(event["timestamp"], UTC)


_CHUNK_BYTES: Final = 256 << 10

_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class ModelServer:
    """Serves ``/tiny-model.bin`` on a free port of 127.0.0.1, with ranges and a validator."""

    file_name = "tiny-model.bin"

    def __init__(self, *, size_bytes: int) -> None:
        """Create the file: incompressible bytes, the same in every run."""
        self.content = hashlib.shake_256(b"nekro-workers demo model").digest(size_bytes)
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.requests = 0
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="model-server", daemon=True)

    @property
    def url(self) -> str:
        """Address of the file."""
        return f"http://127.0.0.1:{self._server.server_port}/{self.file_name}"

    def __enter__(self) -> ModelServer:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._head(200, 0, len(server.content))

            def do_GET(self) -> None:
                server.requests += 1
                if self.path != f"/{server.file_name}":
                    self.send_error(404)
                    return
                start, end = self._wanted()
                if start >= end:
                    self.send_error(416)
                    return
                self._head(206 if "Range" in self.headers else 200, start, end)
                for offset in range(start, end, _CHUNK_BYTES):
                    self.wfile.write(server.content[offset : min(end, offset + _CHUNK_BYTES)])

            def _wanted(self) -> tuple[int, int]:
                size = len(server.content)
                match = _RANGE.fullmatch(self.headers.get("Range", ""))
                if match is None:
                    return 0, size
                return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size

            def _head(self, status: int, start: int, end: int) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(end - start))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{server.sha256[:16]}"')
                if status == 206:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(server.content)}")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing: the timeline shows the download."""

        return Handler


_MODEL_BYTES: Final = 6 << 20
#: Two rounds workers of one round each: a follow-up round finds the other one free.
_WORKERS: Final = (
    worker_spec(Lane.ROUNDS, name="rounds-1", concurrency=1),
    worker_spec(Lane.ROUNDS, name="rounds-2", concurrency=1),
    worker_spec(Lane.METHODS, name="methods-1"),
    worker_spec(Lane.LONG, name="long-1"),
)


@dataclass
class Stage:
    """The running services of the tour; made by ``open_stage``."""

    settings: Settings
    services: Services
    tasks: TaskLog
    models: ModelServer
    workers: list[ChildProcess]
    #: Process id by worker name, those that have ended included.
    pids: dict[str, int] = field(default_factory=dict)

    async def replace(self, old: str, new: str) -> None:
        """Stop a worker and start another one of its lane."""
        child = next(worker for worker in self.workers if worker.spec.name == old)
        self.workers.remove(child)
        await stop_workers([child], self.settings)
        self.workers += await _begin([worker_spec(child.spec.lane, name=new)], self.settings, self.pids)


def demo_settings(base: Settings, data_dir: Path) -> Settings:
    """Return the user's settings with the tour's own services, plugins and model in place of the user's."""
    plugins = Path(__file__).parent / "plugins"
    return base.model_copy(
        update={
            "data_dir": data_dir,
            "broker": base.broker.model_copy(update={"url": None}),
            "results": base.results.model_copy(update={"url": None}),
            "database": base.database.model_copy(update={"url": None}),
            "files": base.files.model_copy(update={"url": LIVE_FILES}),
            "security": base.security.model_copy(update={"signing_key": None}),
            "plugins": base.plugins.model_copy(
                update={"dirs": (plugins,), "disabled": (), "load_shipped": True}
            ),
            "agent": base.agent.model_copy(update={"answers": AnswerMode.WORDS}),
            "downloads": base.downloads.model_copy(update={"allow_private": ("127.0.0.1",)}),
            "llm": base.llm.model_copy(
                update={
                    "script": data_dir / "demo" / "script.yaml",
                    "record": data_dir / "demo" / "llm.jsonl",
                }
            ),
        }
    )


@contextlib.asynccontextmanager
async def open_stage(settings: Settings) -> AsyncIterator[Stage]:
    """Start everything, yield when every worker is ready, stop everything.

    Raises:
        ServiceError: a worker did not start; its log is quoted.
    """
    from nekro.app.services import Services

    assert settings.llm.script is not None  # noqa: S101 - demo_settings sets it
    write_script(settings.llm.script)
    async with contextlib.AsyncExitStack() as stack:
        resolved = await stack.enter_async_context(embedded_services(settings))
        models = stack.enter_context(ModelServer(size_bytes=_MODEL_BYTES))
        services = Services.load(resolved, role="cli")
        tasks = stack.enter_context(TaskLog(services.app))
        pids: dict[str, int] = {}
        workers: list[ChildProcess] = []
        stack.push_async_callback(stop_workers, workers, resolved)
        workers += await _begin(_WORKERS, resolved, pids)
        await services.start()
        stack.push_async_callback(services.close)
        yield Stage(
            settings=resolved, services=services, tasks=tasks, models=models, workers=workers, pids=pids
        )


async def _begin(specs: Sequence[ChildSpec], settings: Settings, pids: dict[str, int]) -> list[ChildProcess]:
    # In the data directory, so that no `.env` of the user's working directory is read.
    workers = await start_workers(specs, settings, directory=settings.data_dir)
    try:
        for worker in workers:
            await worker.ready()
            pids[worker.spec.name] = worker.pid
    except BaseException:
        await stop_workers(workers, settings)
        raise
    return workers
