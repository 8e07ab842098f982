"""What waits and runs: timers, workers, queues, dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from nekro_client.models.base import Answer, Body

__all__ = [
    "Broker",
    "DeadLetter",
    "Queue",
    "Queues",
    "RetryBody",
    "Timer",
    "TimerBody",
    "Work",
    "Worker",
]


class Timer(Answer):
    """A timer of a chat."""

    id: str
    #: ``once`` or ``recurring``.
    kind: str
    chat_key: str
    #: ``waiting`` or ``paused``.
    state: str
    #: None while a recurring timer is paused.
    fires_at: datetime | None
    description: str
    temporary: bool = False
    schedule: str | None = None
    timezone: str | None = None
    workday_mode: str | None = None
    title: str | None = None
    last_fired_at: datetime | None = None
    #: Worker in whose memory a timer with a callback is; such a timer cannot be changed. None for others.
    owner: str | None = None
    #: The plugin of the callback.
    plugin: str | None = None


class TimerBody(Body):
    """A change of a timer."""

    state: Literal["waiting", "paused"]


class DeadLetter(Answer):
    """A message that no worker can run."""

    id: str
    task: str | None = None
    lane: str | None = None
    #: ``broker`` or ``refused``.
    source: str
    reason: str
    deliveries: int
    bytes: int
    #: ``valid`` or ``not valid``; None in lists.
    signature: str | None = None
    #: What is sent again: task, lane, chat, user, size of the arguments. None in lists, and if not valid.
    summary: str | None = None
    chat_key: str | None = None
    deadline: datetime | None = None


class RetryBody(Body):
    """How to send a dead letter again."""

    #: Seconds from now; None keeps the call's deadline.
    timeout_seconds: float | None = Field(None, gt=0, le=86400)


class Worker(Answer):
    """A worker process that published its plugins."""

    id: str
    name: str
    lane: str
    host: str
    pid: int
    started_at: datetime
    #: Whether it renews its lease.
    is_live: bool
    #: Version of nekro-workers that it runs; None if it does not say.
    release: str | None = None
    #: When it counts as dead unless it renews its lease before; None: it has stopped.
    lease_until: datetime | None = None
    #: Recorded calls that it runs. Calls of `tool` methods are not recorded, so they are not counted.
    running_calls: int = 0
    running_rounds: int = 0
    running_jobs: int = 0


class Queue(Answer):
    """A lane's queue."""

    lane: str
    waiting: int
    held: int | None = None
    oldest_seconds: float | None = None


class Broker(Answer):
    """A broker; chats are partitioned over several."""

    #: Its URL without user and password.
    name: str
    is_up: bool
    #: Whether nothing new is sent to it.
    is_drained: bool
    #: Messages that wait there or are held by workers; None if it does not answer.
    messages: int | None


class Work(Answer):
    """Rows of one kind that have not ended."""

    waiting: int
    running: int
    oldest_seconds: float


class Queues(Answer):
    """What waits and runs."""

    queues: list[Queue]
    rounds: Work
    jobs: Work
    #: Programs that wait without a process: for a decision, a job, a time or an answer. None of them runs.
    programs: Work = Work(waiting=0, running=0, oldest_seconds=0)
    #: None for brokers other than Redis, and while the first one does not answer.
    dead_letters: int | None
    #: The first one is that of `NEKRO_BROKER__URL`; the chats of one that is not up wait.
    brokers: list[Broker] = []
