"""One transaction: its connection, the repositories on it, and its callbacks after the commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from loguru import logger

from storage.driver.connection import Connection

if TYPE_CHECKING:
    from storage.accounts.approvals import ApprovalRepository
    from storage.accounts.keys import AuditRepository, KeyRepository
    from storage.accounts.spendings import SpendingRepository
    from storage.accounts.stored_bytes import StoredByteRepository
    from storage.adapters import AdapterRepository
    from storage.catalogue import CatalogueRepository, WorkerListing
    from storage.files.content_rows import ContentRepository
    from storage.files.manifest import ManifestRepository
    from storage.listings.changes import ChangeListing
    from storage.listings.chats import ChatListing, TurnListing, TurnSearch
    from storage.listings.series import OverviewRepository, SeriesRepository, SpendingReportRepository
    from storage.repositories.call_progress import CallProgressRepository, DetachedCallRepository
    from storage.repositories.calls import CallRepository
    from storage.repositories.chats import (
        ChatRepository,
        PromptRepository,
        SummaryRepository,
        VariableRepository,
    )
    from storage.repositories.events import EventRepository
    from storage.repositories.job_log import JobLogRepository, JobSignalRepository
    from storage.repositories.jobs import JobRepository
    from storage.repositories.leases import DownloadRepository, LeaseRepository, RequestRepository
    from storage.repositories.messages import MessageRepository
    from storage.repositories.parked_programs import AwaitingCallRepository, ParkedProgramRepository
    from storage.repositories.plugin_states import (
        ActivationRepository,
        LaneOverrideRepository,
        PluginStateRepository,
    )
    from storage.repositories.records import RecordRepository
    from storage.repositories.rounds import RoundRepository
    from storage.repositories.timers import CronJobRepository, TimerRepository

__all__ = ["Transaction"]

_Repository = TypeVar("_Repository")


class _Lazy(Generic[_Repository]):
    """A repository that is imported, with SQLAlchemy, and constructed when a transaction first uses it."""

    def __init__(self, path: str) -> None:
        self._module, _, self._class = path.partition(":")

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, transaction: Any, _owner: type) -> _Repository:
        repository: _Repository = getattr(import_module(self._module), self._class)(transaction.connection)
        # Further uses find it there, and not this descriptor.
        transaction.__dict__[self._name] = repository
        return repository


class Transaction:
    """Yielded by ``Database.begin()``, ``autocommit()`` and ``read()``; do not construct it directly."""

    #: Plugins of chats that were woken.
    activations: _Lazy[ActivationRepository] = _Lazy(
        "storage.repositories.plugin_states:ActivationRepository"
    )
    #: Clients of adapters, and what they are sent.
    adapters: _Lazy[AdapterRepository] = _Lazy("storage.adapters:AdapterRepository")
    #: Requests for approval of calls.
    approvals: _Lazy[ApprovalRepository] = _Lazy("storage.accounts.approvals:ApprovalRepository")
    #: Administrative acts.
    audit: _Lazy[AuditRepository] = _Lazy("storage.accounts.keys:AuditRepository")
    #: Calls that await approval.
    awaiting_calls: _Lazy[AwaitingCallRepository] = _Lazy(
        "storage.repositories.parked_programs:AwaitingCallRepository"
    )
    #: Progress of calls, stored as jobs.
    call_progress: _Lazy[CallProgressRepository] = _Lazy(
        "storage.repositories.call_progress:CallProgressRepository"
    )
    #: Calls of plugin methods.
    calls: _Lazy[CallRepository] = _Lazy("storage.repositories.calls:CallRepository")
    #: Workers and the plugins that they serve.
    catalogue: _Lazy[CatalogueRepository] = _Lazy("storage.catalogue:CatalogueRepository")
    #: Fingerprints of lists.
    change_listing: _Lazy[ChangeListing] = _Lazy("storage.listings.changes:ChangeListing")
    #: Chats for lists.
    chat_listing: _Lazy[ChatListing] = _Lazy("storage.listings.chats:ChatListing")
    #: Chats and the leases on them.
    chats: _Lazy[ChatRepository] = _Lazy("storage.repositories.chats:ChatRepository")
    #: Contents of files in a store.
    contents: _Lazy[ContentRepository] = _Lazy("storage.files.content_rows:ContentRepository")
    #: Recurring timers.
    cron_jobs: _Lazy[CronJobRepository] = _Lazy("storage.repositories.timers:CronJobRepository")
    #: Calls whose callers no longer wait.
    detached_calls: _Lazy[DetachedCallRepository] = _Lazy(
        "storage.repositories.call_progress:DetachedCallRepository"
    )
    #: Downloads by target.
    downloads: _Lazy[DownloadRepository] = _Lazy("storage.repositories.leases:DownloadRepository")
    #: Events of chats.
    events: _Lazy[EventRepository] = _Lazy("storage.repositories.events:EventRepository")
    #: Areas of files in a store.
    files: _Lazy[ManifestRepository] = _Lazy("storage.files.manifest:ManifestRepository")
    #: Entries of the logs of background jobs.
    job_log: _Lazy[JobLogRepository] = _Lazy("storage.repositories.job_log:JobLogRepository")
    #: Signals of background jobs, and the waits for them.
    job_signals: _Lazy[JobSignalRepository] = _Lazy("storage.repositories.job_log:JobSignalRepository")
    #: Background jobs.
    jobs: _Lazy[JobRepository] = _Lazy("storage.repositories.jobs:JobRepository")
    #: Keys of the HTTP API.
    keys: _Lazy[KeyRepository] = _Lazy("storage.accounts.keys:KeyRepository")
    #: Lane overrides of methods.
    lane_overrides: _Lazy[LaneOverrideRepository] = _Lazy(
        "storage.repositories.plugin_states:LaneOverrideRepository"
    )
    #: Leases by name.
    leases: _Lazy[LeaseRepository] = _Lazy("storage.repositories.leases:LeaseRepository")
    #: Messages of chats.
    messages: _Lazy[MessageRepository] = _Lazy("storage.repositories.messages:MessageRepository")
    #: What waits and runs, for people and metrics.
    overview: _Lazy[OverviewRepository] = _Lazy("storage.listings.series:OverviewRepository")
    #: Operators' decisions which plugins are enabled.
    plugin_states: _Lazy[PluginStateRepository] = _Lazy(
        "storage.repositories.plugin_states:PluginStateRepository"
    )
    #: What rounds sent to the model.
    prompts: _Lazy[PromptRepository] = _Lazy("storage.repositories.chats:PromptRepository")
    #: Queries across chats and plugins.
    records: _Lazy[RecordRepository] = _Lazy("storage.repositories.records:RecordRepository")
    #: Requests with an idempotency key.
    requests: _Lazy[RequestRepository] = _Lazy("storage.repositories.leases:RequestRepository")
    #: Rounds of the LLM.
    rounds: _Lazy[RoundRepository] = _Lazy("storage.repositories.rounds:RoundRepository")
    #: Figures over time.
    series: _Lazy[SeriesRepository] = _Lazy("storage.listings.series:SeriesRepository")
    #: Sums of what was spent.
    spending_reports: _Lazy[SpendingReportRepository] = _Lazy(
        "storage.listings.series:SpendingReportRepository"
    )
    #: What rounds and plugins spent, and the totals that budgets limit.
    spendings: _Lazy[SpendingRepository] = _Lazy("storage.accounts.spendings:SpendingRepository")
    #: Summaries of the older messages of chats.
    summaries: _Lazy[SummaryRepository] = _Lazy("storage.repositories.chats:SummaryRepository")
    #: One-time timers.
    timers: _Lazy[TimerRepository] = _Lazy("storage.repositories.timers:TimerRepository")
    #: Turns for lists.
    turn_listing: _Lazy[TurnListing] = _Lazy("storage.listings.chats:TurnListing")
    #: Turns by what people look for.
    turn_search: _Lazy[TurnSearch] = _Lazy("storage.listings.chats:TurnSearch")
    #: Variables of programs, by turn.
    parked_programs: _Lazy[ParkedProgramRepository] = _Lazy(
        "storage.repositories.parked_programs:ParkedProgramRepository"
    )
    variables: _Lazy[VariableRepository] = _Lazy("storage.repositories.chats:VariableRepository")
    #: Workers for lists.
    worker_listing: _Lazy[WorkerListing] = _Lazy("storage.catalogue:WorkerListing")

    def __init__(self, connection: Connection, *, key_bytes: int = 0) -> None:
        """
        Args:
            key_bytes: see ``StoredByteRepository``.
        """
        self.connection = connection
        self._key_bytes = key_bytes
        self._callbacks: list[Callable[[], Awaitable[object]]] = []

    @cached_property
    def stored_bytes(self) -> StoredByteRepository:
        """What keys of the HTTP API keep stored."""
        from storage.accounts.stored_bytes import StoredByteRepository

        return StoredByteRepository(self.connection, key_bytes=self._key_bytes)

    def after_commit(self, callback: Callable[[], Awaitable[object]]) -> None:
        """Run ``callback`` after the transaction is committed; never if it is rolled back.

        Callbacks run in the order of registration. An error is logged and undoes nothing: the row that
        the callback should have announced is committed, and the sweep finds unannounced rows.
        """
        self._callbacks.append(callback)

    async def flush(self) -> None:
        """Write the events that were added, then charge keys; ``Database.begin`` calls this at the end."""
        if "events" in self.__dict__:
            await self.events.flush()
        if "stored_bytes" in self.__dict__:
            await self.stored_bytes.flush()

    async def run_callbacks(self) -> None:
        """Run the callbacks; ``Database.begin`` calls this after the commit."""
        for callback in self._callbacks:
            try:
                await callback()
            except Exception:  # the transaction is committed; see `after_commit`
                logger.exception("after_commit_callback_failed")
