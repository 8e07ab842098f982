"""What the SDK needs from the system around it: protocols that a runtime implements.

``storage`` and ``workers`` implement them on SQL and Celery, ``nekro_agent.testing`` in memory;
one contract test suite runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "ChatInfo",
    "CronJob",
    "CronJobs",
    "DownloadClaim",
    "DownloadReport",
    "DownloadStatus",
    "Downloads",
    "FileAreas",
    "JobInfo",
    "JobRequest",
    "JobState",
    "Jobs",
    "KeyValueStore",
    "MessageKind",
    "Messages",
    "OutgoingMessage",
    "PluginValue",
    "Records",
    "StoredMessage",
    "SystemMessageHooks",
    "TimerInfo",
    "Timers",
    "WorkdayMode",
]


class KeyValueStore(Protocol):
    """Durable text values per plugin; ``""`` as chat or user key means "none"."""

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None when there is none."""
        ...

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store durably before returning; True when the key is new, False when it was there."""
        ...

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """True when a value was deleted, False when there was none."""
        ...

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns how many."""
        ...


class MessageKind(StrEnum):
    """Who a message of a chat's history comes from."""

    #: A person wrote it on the platform.
    USER = "user"
    #: The agent said it (``send_text`` and its siblings).
    ASSISTANT = "assistant"
    #: An observation or notice for the LLM; not posted to the platform.
    SYSTEM = "system"


@dataclass(frozen=True, kw_only=True)
class OutgoingMessage:
    """Something a plugin sends into a chat.

    ``file_path`` is a sandbox path (``/app/uploads/…``) after the SDK brought the file there;
    ``file_kind`` is ``"image"`` or ``"file"`` when it is set.
    """

    chat_key: str
    text: str = ""
    file_path: str | None = None
    file_name: str | None = None
    file_kind: str | None = None
    record: bool = True
    reply_to: str | None = None
    call_id: str | None = None
    plugin_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatInfo:
    """What is known of a chat."""

    chat_key: str
    container_key: str
    adapter_key: str | None = None
    channel_id: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None
    created_at: datetime | None = None


class Messages(Protocol):
    """A chat's messages; a row exists before a method returns, an event follows it."""

    async def send(self, message: OutgoingMessage) -> str:
        """Record and deliver a message of the agent; returns its id."""
        ...

    async def push_system(self, chat_key: str, text: str, *, trigger_agent: bool, call_id: str | None) -> str:
        """Record a system message, optionally schedule a round in the same transaction; returns its id."""
        ...

    async def wake(self, chat_key: str) -> None:
        """Schedule a round of the chat's agent without a message."""
        ...


class SystemMessageHooks(Protocol):
    """What runs before a plugin's system message is recorded."""

    async def on_system_message(self, chat_key: str, text: str) -> bool:
        """Run the hooks; True when one of them asked that the message be dropped."""
        ...


class FileAreas(Protocol):
    """Host directories of chats, sandboxes and plugins; every directory exists when returned."""

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory that the chat's sandboxes see, read-only, as ``/app/uploads``."""
        ...

    def shared_dir(self, container_key: str) -> Path:
        """Directory that the sandbox sees as ``/app/shared``."""
        ...

    def plugin_dir(self, plugin_key: str) -> Path:
        """The plugin's own directory, ``<root>/plugins/<key>``."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimerInfo:
    """A one-time timer of a chat that has not fired yet."""

    id: str
    chat_key: str
    fire_at: datetime
    description: str
    #: A chat has at most one temporary timer; a new one replaces it.
    temporary: bool


class Timers(Protocol):
    """One-time timers: durable, fired once across the fleet, each firing wakes the chat's agent."""

    async def add(self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool) -> TimerInfo:
        """Keep a timer; a temporary one takes the place of the chat's other one in the same step."""
        ...

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel the chat's timers, or only the (non-)temporary ones; returns how many."""
        ...

    async def pending(self, chat_key: str) -> list[TimerInfo]:
        """Return the chat's timers, soonest first."""
        ...


class WorkdayMode(StrEnum):
    """On which days a recurring timer fires."""

    NONE = "none"
    MON_FRI = "mon_fri"
    WEEKEND = "weekend"
    #: Chinese working days; without a holiday calendar the same as MON_FRI.
    CN_WORKDAY = "cn_workday"
    #: Chinese days off; without a holiday calendar the same as WEEKEND.
    CN_RESTDAY = "cn_restday"


@dataclass(frozen=True, kw_only=True)
class CronJob:
    """A recurring timer of a chat."""

    #: 4 to 12 characters of ``a-z0-9``.
    job_id: str
    chat_key: str
    #: Five fields: minute, hour, day of month, month, day of week.
    cron_expr: str
    #: IANA name, for example ``Asia/Tokyo``.
    timezone: str
    workday_mode: WorkdayMode
    title: str | None
    event_desc: str
    #: None while paused.
    next_fire_at: datetime | None
    last_fired_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def status(self) -> str:
        """``"active"`` or ``"paused"``."""
        return "paused" if self.next_fire_at is None else "active"


class CronJobs(Protocol):
    """Recurring timers: durable, each due time fired once across the fleet."""

    async def add(self, job: CronJob) -> bool:
        """Keep a job; False, and nothing kept, when the id is taken."""
        ...

    async def get(self, job_id: str) -> CronJob | None:
        """Return a job, or None."""
        ...

    async def replace(self, job: CronJob) -> bool:
        """Take over everything but ``last_fired_at`` and ``created_at``; False when there is no such job."""
        ...

    async def delete(self, job_id: str) -> bool:
        """True when there was such a job."""
        ...

    async def of_chat(self, chat_key: str) -> list[CronJob]:
        """Return the chat's jobs, oldest first."""
        ...

    async def run_now(self, job_id: str) -> bool:
        """Fire once, apart from the schedule; False when there is no such job."""
        ...


class JobState(StrEnum):
    """Where a background job of a plugin is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A background job to start."""

    plugin_key: str
    #: What the plugin mounted; unique within the plugin.
    task_type: str
    #: The plugin's own name for it; at most one open job per plugin, type and name.
    task_id: str
    chat_key: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Whether another worker starts it again when its worker died; else it fails then.
    restarts: bool = True
    #: Called with the final ``TaskCtl`` if this process is still there when the job ends.
    on_terminal: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What is known of a background job."""

    id: str
    plugin_key: str
    task_type: str
    task_id: str
    chat_key: str
    state: JobState
    #: 0 to 100.
    percent: int
    message: str
    #: What the job's last signal carried; JSON values.
    data: Any
    cancel_requested: bool


class Jobs(Protocol):
    """Background jobs of plugins.

    The reference's ``is_running``, ``get_state`` and ``notify`` are ordinary functions, so their
    counterparts here are too; they answer within milliseconds.
    """

    async def start(self, request: JobRequest) -> JobInfo:
        """Record the job durably and have it run.

        Raises:
            ConflictError: a job of that plugin, type and name is open.
        """
        ...

    def peek(self, plugin_key: str, task_type: str, task_id: str) -> JobInfo | None:
        """Return the newest job of that name, or None."""
        ...

    async def cancel(self, job_id: str) -> bool:
        """Ask a job to end; False when it has ended already."""
        ...

    def notify(self, job_id: str, key: str, data: Any) -> bool:
        """Hand data to a job's ``wait(key)``; kept when nobody waits yet. False when the job has ended."""
        ...

    async def wait(self, job_id: str, key: str, *, timeout_seconds: float | None) -> Any:
        """Return what ``notify`` brought for ``key``, and forget it.

        Raises:
            TimeoutError: nothing came in time.
            asyncio.CancelledError: the wait was cancelled.
        """
        ...

    def cancel_wait(self, job_id: str, key: str | None = None) -> int:
        """Cancel the waits for ``key``, or all of the job's; returns how many."""
        ...

    def running(self) -> list[JobInfo]:
        """Return every open job."""
        ...


@dataclass(frozen=True, kw_only=True)
class StoredMessage:
    """One message of a chat's history, as plugins query it."""

    #: Grows with time within an installation.
    sequence: int
    id: str
    chat_key: str
    kind: MessageKind
    sender_id: str | None
    sender_name: str | None
    text: str
    created_at: datetime
    adapter_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class PluginValue:
    """One value of ``plugin.store``."""

    plugin_key: str
    chat_key: str
    user_key: str
    store_key: str
    value: str


class Records(Protocol):
    """Reading the tables that plugins of the reference query through its models."""

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; of all chats when ``chat_key`` is None."""
        ...

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; only that one when ``chat_key`` is given."""
        ...

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values; None does not narrow."""
        ...


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """How a download ended: what it brought, or what was wrong."""

    size_bytes: int = 0
    sha256: str = ""
    content_type: str | None = None
    #: Where the content came from, after redirects.
    final_url: str = ""
    #: None when it succeeded.
    error: str | None = None
    #: Whether the same request may succeed later.
    retryable: bool = True


@dataclass(frozen=True, kw_only=True)
class DownloadStatus:
    """The newest download to a target."""

    #: What it fetches, and what it checks: downloads with another key have another outcome.
    request: str
    #: Counts the claims on the target.
    fence: int
    done_bytes: int
    whole_bytes: int | None
    #: None while it runs, and after its worker died.
    report: DownloadReport | None


class DownloadClaim(Protocol):
    """The right to download to a target; kept alive by whoever gave it."""

    @property
    def previous(self) -> DownloadStatus | None:
        """The download to the target before this one."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the right passed to somebody else, or may have; no I/O."""
        ...

    def progress(self, done_bytes: int, whole_bytes: int | None) -> None:
        """Let others see how far it is; returns at once, written soon."""
        ...

    async def confirm(self) -> None:
        """Check once more, before the target is replaced.

        Raises:
            FencedError: the right passed to somebody else.
        """
        ...

    async def end(self, report: DownloadReport | None) -> None:
        """Give the right back; None when another try is to go on with what is there."""
        ...


class Downloads(Protocol):
    """One download per target across the fleet."""

    async def claim(self, target: Path, *, request: str) -> DownloadClaim | None:
        """Take the right to download to ``target``; None when somebody else has it."""
        ...

    async def status(self, target: Path) -> DownloadStatus | None:
        """Return how far the download to ``target`` is, or how it ended; None when there never was one."""
        ...
