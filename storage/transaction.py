"""One transaction: its connection, the repositories on it, and its callbacks after the commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING

from loguru import logger

from storage.driver.connection import Connection

if TYPE_CHECKING:
    from storage.accounts.approvals import ApprovalRepository, AwaitingCallRepository
    from storage.accounts.keys import AuditRepository, KeyRepository
    from storage.accounts.openai_responses import OpenAIResponseRepository
    from storage.accounts.spendings import SpendingRepository
    from storage.accounts.stored_bytes import StoredByteRepository
    from storage.catalogue import CatalogueRepository, WorkerListing
    from storage.listings.changes import ChangeListing
    from storage.listings.chats import ChatListing
    from storage.listings.series import SeriesRepository, SpendingReportRepository
    from storage.listings.turns import TurnListing, TurnSearch
    from storage.outbound.adapters import AdapterRepository
    from storage.outbound.mcp_servers import McpServerRepository
    from storage.outbound.webhooks import WebhookRepository
    from storage.repositories.call_progress import CallProgressRepository, DetachedCallRepository
    from storage.repositories.calls import CallRepository
    from storage.repositories.chats import ChatRepository
    from storage.repositories.downloads import DownloadRepository
    from storage.repositories.events import EventRepository
    from storage.repositories.job_log import JobLogRepository, JobSignalRepository
    from storage.repositories.jobs import JobRepository
    from storage.repositories.leases import LeaseRepository, RequestRepository
    from storage.repositories.memory import PromptRepository, SummaryRepository, VariableRepository
    from storage.repositories.messages import MessageRepository
    from storage.repositories.plugin_states import (
        ActivationRepository,
        LaneOverrideRepository,
        PluginStateRepository,
    )
    from storage.repositories.records import RecordRepository
    from storage.repositories.rounds import RoundRepository
    from storage.repositories.timers import CronJobRepository, TimerRepository

__all__ = ["Repositories", "Transaction"]


class Repositories:
    """All repositories on one connection; each is imported at its first use, with SQLAlchemy."""

    def __init__(self, connection: Connection, *, key_bytes: int = 0) -> None:
        """
        Args:
            key_bytes: as of ``StoredByteRepository``.
        """
        self._runner = connection
        self._key_bytes = key_bytes

    @cached_property
    def activations(self) -> ActivationRepository:
        """Plugins of chats that were woken."""
        from storage.repositories.plugin_states import ActivationRepository

        return ActivationRepository(self._runner)

    @cached_property
    def adapters(self) -> AdapterRepository:
        """Clients of adapters, and what they are sent."""
        from storage.outbound.adapters import AdapterRepository

        return AdapterRepository(self._runner)

    @cached_property
    def approvals(self) -> ApprovalRepository:
        """Requests for approval of calls."""
        from storage.accounts.approvals import ApprovalRepository

        return ApprovalRepository(self._runner)

    @cached_property
    def audit(self) -> AuditRepository:
        """Administrative acts."""
        from storage.accounts.keys import AuditRepository

        return AuditRepository(self._runner)

    @cached_property
    def awaiting_calls(self) -> AwaitingCallRepository:
        """Calls that await approval."""
        from storage.accounts.approvals import AwaitingCallRepository

        return AwaitingCallRepository(self._runner)

    @cached_property
    def call_progress(self) -> CallProgressRepository:
        """Progress of calls, stored as jobs."""
        from storage.repositories.call_progress import CallProgressRepository

        return CallProgressRepository(self._runner)

    @cached_property
    def calls(self) -> CallRepository:
        """Calls of plugin methods."""
        from storage.repositories.calls import CallRepository

        return CallRepository(self._runner)

    @cached_property
    def catalogue(self) -> CatalogueRepository:
        """Workers and the plugins that they serve."""
        from storage.catalogue import CatalogueRepository

        return CatalogueRepository(self._runner)

    @cached_property
    def change_listing(self) -> ChangeListing:
        """Fingerprints of lists."""
        from storage.listings.changes import ChangeListing

        return ChangeListing(self._runner)

    @cached_property
    def chat_listing(self) -> ChatListing:
        """Chats for lists."""
        from storage.listings.chats import ChatListing

        return ChatListing(self._runner)

    @cached_property
    def chats(self) -> ChatRepository:
        """Chats and the leases on them."""
        from storage.repositories.chats import ChatRepository

        return ChatRepository(self._runner)

    @cached_property
    def cron_jobs(self) -> CronJobRepository:
        """Recurring timers."""
        from storage.repositories.timers import CronJobRepository

        return CronJobRepository(self._runner)

    @cached_property
    def detached_calls(self) -> DetachedCallRepository:
        """Calls whose callers no longer wait."""
        from storage.repositories.call_progress import DetachedCallRepository

        return DetachedCallRepository(self._runner)

    @cached_property
    def downloads(self) -> DownloadRepository:
        """Downloads by target."""
        from storage.repositories.downloads import DownloadRepository

        return DownloadRepository(self._runner)

    @cached_property
    def events(self) -> EventRepository:
        """Events of chats."""
        from storage.repositories.events import EventRepository

        return EventRepository(self._runner)

    @cached_property
    def jobs(self) -> JobRepository:
        """Background jobs."""
        from storage.repositories.jobs import JobRepository

        return JobRepository(self._runner)

    @cached_property
    def job_log(self) -> JobLogRepository:
        """Entries of the logs of background jobs."""
        from storage.repositories.job_log import JobLogRepository

        return JobLogRepository(self._runner)

    @cached_property
    def job_signals(self) -> JobSignalRepository:
        """Signals of background jobs, and the waits for them."""
        from storage.repositories.job_log import JobSignalRepository

        return JobSignalRepository(self._runner)

    @cached_property
    def keys(self) -> KeyRepository:
        """Keys of the HTTP API."""
        from storage.accounts.keys import KeyRepository

        return KeyRepository(self._runner)

    @cached_property
    def openai_responses(self) -> OpenAIResponseRepository:
        """Responses of the OpenAI-compatible API."""
        from storage.accounts.openai_responses import OpenAIResponseRepository

        return OpenAIResponseRepository(self._runner)

    @cached_property
    def leases(self) -> LeaseRepository:
        """Leases by name."""
        from storage.repositories.leases import LeaseRepository

        return LeaseRepository(self._runner)

    @cached_property
    def lane_overrides(self) -> LaneOverrideRepository:
        """Lane overrides of methods."""
        from storage.repositories.plugin_states import LaneOverrideRepository

        return LaneOverrideRepository(self._runner)

    @cached_property
    def mcp_servers(self) -> McpServerRepository:
        """MCP servers and their tools."""
        from storage.outbound.mcp_servers import McpServerRepository

        return McpServerRepository(self._runner)

    @cached_property
    def messages(self) -> MessageRepository:
        """Messages of chats."""
        from storage.repositories.messages import MessageRepository

        return MessageRepository(self._runner)

    @cached_property
    def plugin_states(self) -> PluginStateRepository:
        """Operators' decisions which plugins are enabled."""
        from storage.repositories.plugin_states import PluginStateRepository

        return PluginStateRepository(self._runner)

    @cached_property
    def prompts(self) -> PromptRepository:
        """What rounds sent to the model."""
        from storage.repositories.memory import PromptRepository

        return PromptRepository(self._runner)

    @cached_property
    def records(self) -> RecordRepository:
        """Queries across chats and plugins."""
        from storage.repositories.records import RecordRepository

        return RecordRepository(self._runner)

    @cached_property
    def requests(self) -> RequestRepository:
        """Requests with an idempotency key."""
        from storage.repositories.leases import RequestRepository

        return RequestRepository(self._runner)

    @cached_property
    def rounds(self) -> RoundRepository:
        """Rounds of the LLM."""
        from storage.repositories.rounds import RoundRepository

        return RoundRepository(self._runner)

    @cached_property
    def summaries(self) -> SummaryRepository:
        """Summaries of the older messages of chats."""
        from storage.repositories.memory import SummaryRepository

        return SummaryRepository(self._runner)

    @cached_property
    def series(self) -> SeriesRepository:
        """Figures over time."""
        from storage.listings.series import SeriesRepository

        return SeriesRepository(self._runner)

    @cached_property
    def spending_reports(self) -> SpendingReportRepository:
        """Sums of what was spent."""
        from storage.listings.series import SpendingReportRepository

        return SpendingReportRepository(self._runner)

    @cached_property
    def spendings(self) -> SpendingRepository:
        """What rounds and plugins spent, and the totals that budgets limit."""
        from storage.accounts.spendings import SpendingRepository

        return SpendingRepository(self._runner)

    @cached_property
    def stored_bytes(self) -> StoredByteRepository:
        """What keys of the HTTP API keep stored."""
        from storage.accounts.stored_bytes import StoredByteRepository

        return StoredByteRepository(self._runner, key_bytes=self._key_bytes)

    @cached_property
    def turn_listing(self) -> TurnListing:
        """Turns for lists."""
        from storage.listings.turns import TurnListing

        return TurnListing(self._runner)

    @cached_property
    def turn_search(self) -> TurnSearch:
        """Turns by what people look for."""
        from storage.listings.turns import TurnSearch

        return TurnSearch(self._runner)

    @cached_property
    def timers(self) -> TimerRepository:
        """One-time timers."""
        from storage.repositories.timers import TimerRepository

        return TimerRepository(self._runner)

    @cached_property
    def variables(self) -> VariableRepository:
        """Variables of programs, by turn."""
        from storage.repositories.memory import VariableRepository

        return VariableRepository(self._runner)

    @cached_property
    def webhooks(self) -> WebhookRepository:
        """Subscriptions of URLs to events, and their deliveries."""
        from storage.outbound.webhooks import WebhookRepository

        return WebhookRepository(self._runner)

    @cached_property
    def worker_listing(self) -> WorkerListing:
        """Workers for lists."""
        from storage.catalogue import WorkerListing

        return WorkerListing(self._runner)


class Transaction(Repositories):
    """Yielded by ``Database.begin()``, ``autocommit()`` and ``read()``; do not construct it directly."""

    def __init__(self, connection: Connection, *, key_bytes: int = 0) -> None:
        super().__init__(connection, key_bytes=key_bytes)
        self.connection = connection
        self._callbacks: list[Callable[[], Awaitable[object]]] = []

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
