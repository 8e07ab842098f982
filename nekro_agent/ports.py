"""The SDK's ports: protocols that a runtime implements.

``storage`` and ``workers`` implement them on SQL and Celery; in ``nekro_agent.testing``, jobs are tasks of
the test's loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

from nekro_agent import layout
from nekro_agent.errors import InvalidValueError

__all__ = [
    "MOST_TEXT_CHARS",
    "CallbackTimer",
    "ChatInfo",
    "CronJob",
    "CronJobs",
    "DownloadClaim",
    "DownloadParts",
    "DownloadReport",
    "DownloadStatus",
    "Downloads",
    "FileAreas",
    "IncomingMessage",
    "Intake",
    "JobInfo",
    "JobRequest",
    "JobState",
    "Jobs",
    "KeyValueStore",
    "MessageKind",
    "Messages",
    "ModelBudget",
    "ModelCharge",
    "ModelRequest",
    "OutgoingMessage",
    "PartialContent",
    "SystemMessageHooks",
    "TimerInfo",
    "Timers",
    "WorkdayMode",
    "require_lengths",
]

#: Longest text of a message; more than models read of one message.
MOST_TEXT_CHARS: Final = 256 << 10
#: Longest id and name of a sender.
_MOST_NAME_CHARS: Final = 512
#: Longest rest of a message, as JSON: segments, names of files, data of plugins.
_MOST_DATA_CHARS: Final = 1 << 20


class KeyValueStore(Protocol):
    """Durable text values per plugin; ``""`` as chat or user key means "none"."""

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None if there is none."""
        ...

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store durably before returning; True if the key is new, False if it existed."""
        ...

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """Delete a value; True if there was one."""
        ...

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns their number."""
        ...


class MessageKind(StrEnum):
    """The origin of a message of a chat's history."""

    #: A person wrote it on the platform.
    USER = "user"
    #: Sent by the agent (``send_text`` and the like).
    ASSISTANT = "assistant"
    #: An observation or notice for the LLM; not posted to the platform.
    SYSTEM = "system"


@dataclass(frozen=True, kw_only=True)
class OutgoingMessage:
    """A message that a plugin sends into a chat.

    ``file_path`` is a sandbox path (``/app/uploads/…``); the SDK has copied the file there;
    ``file_kind`` is then ``"image"`` or ``"file"``.
    """

    chat_key: str
    text: str = ""
    file_path: str | None = None
    file_name: str | None = None
    file_kind: str | None = None
    #: By its content.
    file_media_type: str | None = None
    #: Size of the file in bytes, and the last change of its content in nanoseconds since the epoch.
    file_size: int | None = None
    file_modified_ns: int | None = None
    record: bool = True
    reply_to: str | None = None
    call_id: str | None = None
    plugin_key: str | None = None
    #: Id of its row; a message whose id exists is not sent again. None: a new one.
    id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatInfo:
    """A chat's recorded properties; adapter and channel follow from the key where none are recorded."""

    chat_key: str
    container_key: str
    adapter_key: str | None = None
    channel_id: str | None = None
    channel_name: str | None = None
    channel_type: str | None = None
    #: The title that was given to the chat; None: it has none of its own.
    title: str | None = None
    created_at: datetime | None = None
    #: When the present conversation began; None until the first reset.
    reset_at: datetime | None = None
    #: The stored preset that is the agent's persona here; None means the persona of the settings.
    preset_id: int | None = None
    #: Whether the agent takes part at all.
    is_active: bool = True
    #: Whether the agent reads along without starting turns.
    observe_mode: bool = False
    #: The model group that answers; None means ``default``.
    model_group: str | None = None
    #: Counts changes and deletions of messages.
    history_revision: int = 0

    def __post_init__(self) -> None:
        # Rows of older releases and of intakes that state nothing have only the key.
        if self.adapter_key is None or self.channel_id is None or self.channel_type is None:
            for name, value in layout.channel_of(self.chat_key)._asdict().items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)

    @property
    def starts_turns(self) -> bool:
        """Whether triggers start turns of the agent."""
        return self.is_active and not self.observe_mode


@dataclass(frozen=True, kw_only=True)
class IncomingMessage:
    """A person's message, as an intake (a connector, a command) posts it."""

    chat_key: str
    text: str
    #: Platform id of the sender.
    user_id: str
    user_name: str
    #: The sender's name in this chat; "" means ``user_name``.
    nickname: str = ""
    #: Whether it is to the agent; a message that is not starts no turn unless a hook demands it.
    is_tome: bool = True
    #: What the intake knows of the chat; None keeps what is recorded or follows from the key.
    adapter_key: str | None = None
    channel_id: str | None = None
    #: ``"group"`` or ``"private"``.
    channel_type: str | None = None
    channel_name: str | None = None
    #: The platform's id of the message, if it has one.
    platform_message_id: str = ""
    #: Segments as JSON values, those of files and pictures with the ``file_name`` in the chat's uploads;
    #: empty means that the text is all.
    content_data: Sequence[Mapping[str, Any]] = ()
    ext_data: Mapping[str, Any] = field(default_factory=dict)
    raw_cq_code: str = ""


def require_lengths(
    text: str,
    *,
    sender_id: str | None = None,
    sender_name: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Return if a message of a person or a plugin is short enough; history, events and pages have all of it.

    Raises:
        InvalidValueError: it is not; the message says what is too long, and where it may go.
    """
    if len(text) > MOST_TEXT_CHARS:
        raise InvalidValueError(
            f"the message has {len(text)} characters, at most {MOST_TEXT_CHARS}: send the text as a file"
        )
    for name, value in (("id", sender_id), ("name", sender_name)):
        if value is not None and len(value) > _MOST_NAME_CHARS:
            raise InvalidValueError(
                f"the sender's {name} has {len(value)} characters, at most {_MOST_NAME_CHARS}"
            )
    if data and (chars := len(json.dumps(data, ensure_ascii=False))) > _MOST_DATA_CHARS:
        raise InvalidValueError(
            f"the message's parts and data have {chars} characters, at most {_MOST_DATA_CHARS}: send a file"
        )


class Intake(Protocol):
    """Receives messages from people."""

    async def receive(self, message: IncomingMessage) -> str | None:
        """Run the plugins' hooks, record the message, and start a turn if it should have one.

        Returns the message's id; None if a hook dropped it.
        """
        ...


class Messages(Protocol):
    """A chat's messages; the row exists before a method returns, and an event follows it."""

    async def send(self, message: OutgoingMessage) -> str:
        """Record and deliver a message of the agent; returns its id."""
        ...

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message and optionally request a round in the same transaction; returns its id.

        Args:
            message_id: a message whose id exists is not recorded again; None: a new one.
        """
        ...

    async def wake(self, chat_key: str) -> None:
        """Request a round of the chat's agent without a message."""
        ...


class SystemMessageHooks(Protocol):
    """Hooks of all plugins that services of the SDK run."""

    async def on_channel_reset(self, chat_key: str) -> None:
        """Run the reset hooks for a chat."""
        ...

    async def on_system_message(self, chat_key: str, text: str) -> bool:
        """Run the hooks; True if one of them requests that the message be dropped."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request of a plugin to a model that it is about to send."""

    model: str
    #: None: the default of the client.
    base_url: str | None
    #: An estimate.
    prompt_tokens: int
    #: Most tokens of the answer; None: no limit.
    answer_tokens: int | None


class ModelCharge(Protocol):
    """What was counted for a request; without ``settle`` the estimate stays."""

    async def settle(
        self, *, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0, is_estimated: bool = False
    ) -> None:
        """Count what was used instead of the estimate; 0 if the model did not answer.

        ``cached_tokens`` are those of the prompt that the endpoint had in its cache; ``is_estimated`` says
        that the endpoint reported no possible number of tokens.
        """
        ...


class ModelBudget(Protocol):
    """Limits what plugins ask of the configured models."""

    async def reserve(self, request: ModelRequest) -> ModelCharge | None:
        """Count what a request is expected to use, on the account of the running code.

        Returns None for a model that is not configured, which is neither limited nor counted.

        Raises:
            BudgetExceededError: a budget is used up; the request must not be sent.
        """
        ...


class FileAreas(Protocol):
    """Host directories of chats, sandboxes and plugins; every directory exists when returned."""

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory that appears in the chat's sandboxes as ``/app/uploads``, read-only."""
        ...

    def shared_dir(self, container_key: str) -> Path:
        """Directory that appears in the sandbox as ``/app/shared``."""
        ...

    def plugin_dir(self, plugin_key: str) -> Path:
        """The plugin's own directory, ``<root>/plugins/<key>``."""
        ...

    def configs_dir(self) -> Path:
        """Directory of the configurations of all plugins, before one is written."""
        ...

    @property
    def is_synced(self) -> bool:
        """Whether this host has copies, which the other methods keep up to date.

        False: all hosts see these directories at any time, and the other methods do nothing.
        """
        ...

    def scope(
        self,
        label: str,
        *,
        chat_key: str | None = None,
        container_key: str | None = None,
        plugin_key: str | None = None,
    ) -> AbstractAsyncContextManager[object]:
        """Serve the areas that plugin code in a block requests, and commit its changes at the end.

        Args:
            label: what runs; areas that its earlier blocks used are brought first.
            chat_key, container_key: whose areas these are.
            plugin_key: whose code runs.
        """
        ...

    async def bring(self, *, chat_key: str | None = None, container_key: str | None = None) -> None:
        """Bring a chat's uploads and a sandbox's shared files; later requests for their paths do not wait."""
        ...

    async def commit(self) -> None:
        """Commit what the surrounding block has changed so far, before something names its files."""
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


@dataclass(frozen=True, kw_only=True)
class CallbackTimer(TimerInfo):
    """A timer that calls a function of the process that set it, instead of triggering the agent."""

    #: The plugin whose code set it; "" for other code.
    plugin_key: str


class Timers(Protocol):
    """One-time timers: durable, fired once in the whole fleet; each firing triggers the chat's agent."""

    async def add(self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool) -> TimerInfo:
        """Add a timer; a temporary one atomically replaces the chat's other temporary timer."""
        ...

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel the chat's timers, or only the (non-)temporary ones; returns their number."""
        ...

    async def delete(self, timer_id: str) -> bool:
        """Cancel one timer; False if it has fired, was cancelled or does not exist."""
        ...

    async def pending(self, chat_key: str) -> list[TimerInfo]:
        """Return the chat's timers, soonest first."""
        ...


class WorkdayMode(StrEnum):
    """The days on which a recurring timer fires."""

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
    """Recurring timers: durable, each due time fired once in the whole fleet."""

    async def add(self, job: CronJob) -> bool:
        """Add a job; False, without effect, if the id is taken."""
        ...

    async def get(self, job_id: str) -> CronJob | None:
        """Return a job, or None."""
        ...

    async def replace(self, job: CronJob) -> bool:
        """Replace all but ``last_fired_at`` and ``created_at``; False if there is no such job."""
        ...

    async def delete(self, job_id: str) -> bool:
        """Delete a job; True if there was one."""
        ...

    async def of_chat(self, chat_key: str | None) -> list[CronJob]:
        """Return the jobs of a chat, or of all chats if it is None, oldest first."""
        ...

    async def run_now(self, job_id: str) -> bool:
        """Fire once, independently of the schedule; False if there is no such job."""
        ...


class JobState(StrEnum):
    """State of a plugin's background job."""

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
    #: Name that the plugin gave the function when it mounted it; unique within the plugin.
    task_type: str
    #: The plugin's own name for it; at most one open job per plugin, type and name.
    task_id: str
    chat_key: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Whether another worker restarts it after its worker died; otherwise it fails then.
    restarts: bool = True
    #: Called with the final ``TaskCtl`` if this process still runs when the job ends.
    on_terminal: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """A background job's recorded state."""

    id: str
    plugin_key: str
    task_type: str
    task_id: str
    chat_key: str
    state: JobState
    #: 0 to 100.
    percent: int
    message: str
    #: Data of the job's last signal, as JSON values.
    data: Any
    cancel_requested: bool


class Jobs(Protocol):
    """Background jobs of plugins.

    The reference's ``is_running``, ``get_state`` and ``notify`` are synchronous, so their
    counterparts here are too; they return within milliseconds.
    """

    async def start(self, request: JobRequest) -> JobInfo:
        """Record the job durably and start it on a worker.

        Raises:
            ConflictError: a job of that plugin, type and name is open.
        """
        ...

    def peek(self, plugin_key: str, task_type: str, task_id: str) -> JobInfo | None:
        """Return the newest job of that name, or None."""
        ...

    async def cancel(self, job_id: str) -> bool:
        """Ask a job to end; False if it has already ended."""
        ...

    def notify(self, job_id: str, key: str, data: Any) -> bool:
        """Pass data to a job's ``wait(key)``; stored if there is no wait yet. False if the job has ended."""
        ...

    async def wait(self, job_id: str, key: str, *, timeout_seconds: float | None) -> Any:
        """Return the data of ``notify`` for ``key``, and delete them.

        Raises:
            TimeoutError: no signal came in time.
            asyncio.CancelledError: the wait was cancelled.
        """
        ...

    def cancel_wait(self, job_id: str, key: str | None = None) -> int:
        """Cancel the waits for ``key``, or all waits of the job; returns their number."""
        ...

    def running(self) -> list[JobInfo]:
        """Return every open job."""
        ...


@dataclass(frozen=True, kw_only=True)
class DownloadReport:
    """The result of a download: properties of the content, or the error."""

    size_bytes: int = 0
    sha256: str = ""
    content_type: str | None = None
    #: URL of the content, after redirects.
    final_url: str = ""
    #: Name that the server states for the file, without directories; None if it states none.
    file_name: str | None = None
    #: None when it succeeded.
    error: str | None = None
    #: Whether the same request may succeed later.
    retryable: bool = True


@dataclass(frozen=True, kw_only=True)
class DownloadStatus:
    """The newest download to a target."""

    #: Identifies what is fetched and checked: a download with another key has another result.
    request: str
    #: Fencing token: counts the claims on the target.
    fence: int
    done_bytes: int
    whole_bytes: int | None
    #: None while it runs, and after its worker died.
    report: DownloadReport | None


@dataclass(frozen=True, kw_only=True)
class PartialContent:
    """A content; the fleet's store has some of its parts, or all."""

    url: str
    #: Expected digest; None: any.
    sha256: str | None
    validator: str | None
    whole_bytes: int
    #: Size of each part by its offset.
    parts: Mapping[int, int] = field(default_factory=dict)


class DownloadParts(Protocol):
    """The content of a claimed download in the store of hosts that share no disk.

    Each method raises ``StorageUnavailableError`` if the store or the database does not answer, and those
    that write raise ``FencedError`` if the claim passed to another owner.
    """

    def part_bytes(self, whole_bytes: int) -> int:
        """Return the size of each part but the last of a content of this size."""
        ...

    async def find(self, sha256: str | None, *, is_public: bool) -> PartialContent | None:
        """Return the whole content with this digest, else what an earlier attempt stored; None: nothing.

        Args:
            is_public: as in ``finish``.
        """
        ...

    async def read(self, offset: int) -> bytes | None:
        """Return a verified part of what was found; None if the store lost or altered it."""
        ...

    async def put(self, of: PartialContent, offset: int, data: bytes) -> None:
        """Store a part; parts of another content are discarded."""
        ...

    async def finish(
        self, sha256: str, size_bytes: int, *, read: Callable[[int, int], bytes], is_public: bool
    ) -> None:
        """Store the whole content; it replaces the parts when the claim ends with a report of success.

        Until then another owner of the claim finds the parts.

        Args:
            read: returns the bytes at an offset, of a size; it blocks.
            is_public: whether downloads to other targets may use the content.

        Raises:
            DownloadError: the bytes have another digest.
        """
        ...

    async def discard(self) -> None:
        """Forget the parts, because they are of no use; errors are logged."""
        ...


class DownloadClaim(Protocol):
    """The exclusive right to download to a target; renewed by the ``Downloads`` that granted it."""

    @property
    def fence(self) -> int:
        """Fencing token of the claim."""
        ...

    @property
    def previous(self) -> DownloadStatus | None:
        """The download to the target before this one."""
        ...

    @property
    def parts(self) -> DownloadParts | None:
        """The store of the content; None if each host finds the partial file beside the target."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the claim passed to another owner, or may have; no I/O."""
        ...

    def progress(self, done_bytes: int, whole_bytes: int | None) -> None:
        """Publish the progress; returns at once, the write follows soon."""
        ...

    async def confirm(self) -> None:
        """Verify the claim, before the target is replaced.

        Raises:
            FencedError: the claim passed to another owner.
        """
        ...

    async def end(self, report: DownloadReport | None) -> None:
        """Release the claim; None means that another attempt should continue with the partial file."""
        ...


class Downloads(Protocol):
    """One download per target in the whole fleet."""

    async def claim(self, target: Path, *, request: str) -> DownloadClaim | None:
        """Claim the download to ``target``; None if another download holds the claim."""
        ...

    async def status(self, target: Path) -> DownloadStatus | None:
        """Return the progress of the download to ``target``, or its end; None if there was none."""
        ...
