"""Background jobs and their logs."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field, JsonValue

from nekro_client.models.base import Answer, Body, PlainJson

__all__ = [
    "Job",
    "JobAttempt",
    "JobLog",
    "JobLogEntry",
    "SignalBody",
]


class Job(Answer):
    """A background job of a plugin."""

    id: str
    type: str
    plugin: str
    chat_key: str
    #: ``queued``, ``running``, ``done``, ``failed`` or ``cancelled``.
    state: str
    percent: int = 0
    message: str = ""
    #: The plugin's own name for it.
    task_id: str | None = None
    #: How many times it was started.
    attempt: int = 0
    worker: str | None = None
    #: What it reported last besides its message.
    data: JsonValue = None
    #: The turn whose call started it, and the call; None for a job that no call started.
    turn_id: str | None = None
    call_id: str | None = None
    #: The job that it repeats, which had failed or was cancelled.
    retry_of: str | None = None
    #: Whether ``POST /jobs/{id}/retry`` starts it again, unless a job of its name is open.
    can_retry: bool = False
    cancel_requested_at: datetime | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    updated_at: datetime | None = None
    finished_at: datetime | None = None


class JobAttempt(Answer):
    """One attempt at a job, by one worker."""

    #: From 1.
    number: int
    worker: str | None = None
    started_at: datetime
    #: None while it runs, and if its worker died: no row records when.
    ended_at: datetime | None = None
    #: ``running``, ``done``, ``failed``, ``cancelled``, ``released`` (its worker stopped), ``restarted``
    #: (after an outage) or ``lost`` (its worker died).
    outcome: str
    #: Why it ended.
    message: str = ""
    #: When it was last heard of.
    last_at: datetime


class JobLogEntry(Answer):
    """An entry of a job's log."""

    at: datetime
    #: ``started``, ``report`` (of progress), ``line`` (logged by the job's code), ``cancel_requested``, or
    #: how the attempt ended.
    kind: str
    attempt: int
    #: Of a start.
    worker: str | None = None
    #: Of a report.
    percent: int | None = None
    #: Of a line: ``INFO``, ``WARNING``, …
    level: str | None = None
    text: str = ""


class JobLog(Answer):
    """What happened to a job, the oldest first."""

    attempts: list[JobAttempt]
    #: Of reports and lines those among the newest 300 entries.
    entries: list[JobLogEntry]


class SignalBody(Body):
    """A signal to a job that waits for it."""

    key: str = Field(min_length=1, max_length=200)
    data: PlainJson = None
