"""Record the tasks of the demo from Celery's task events."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from celery import Celery

from nekro_agent.durations import POLL_SECONDS, PROGRAM_SECONDS

__all__ = ["TaskLog", "TaskRecord"]


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
