"""The services of one process, each built from the settings at first use.

This is the composition root: only here are implementations chosen. Each is imported where it is built,
because a command needs few of them, and importing all would take longer than a call.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from broker_config.urls import is_redis
from nekro.base.shared_property import shared_property
from nekro.plugins.entry_registry import Registry
from nekro_agent.errors import RuntimeNotBoundError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from broker_config.app import NekroApp
    from nekro.agent.room import ModelContexts
    from nekro.app.approvals.decisions import ApprovalDecisions
    from nekro.app.approvals.requests import ApprovalRequests, ApprovalSeal
    from nekro.app.background import BackgroundLoop
    from nekro.app.calls.detached import CallDetacher
    from nekro.app.calls.dispatch import Dispatcher
    from nekro.app.calls.fleet_calls import CommandSender, FleetHooks, MessageHooks, PluginTasks
    from nekro.app.catalogue import CatalogueReader, LaneOverrides
    from nekro.app.chats.attachments import FileIds
    from nekro.app.chats.publisher import EventPublisher
    from nekro.app.clock_watch import ClockWatch
    from nekro.app.leases import LeaseKeeper
    from nekro.app.rounds.intake import MessageIntake
    from nekro.app.rounds.ledger import RoundLedger
    from nekro.app.rounds.runs import CodeRuns, RemoteRuns
    from nekro.app.rounds.stop import RoundStopper
    from nekro.app.rounds.summaries import ChatSummaries
    from nekro.app.spending import Spending
    from nekro.app.timers import TimerFirings
    from nekro.base.redaction import Redactor
    from nekro.broker.calls import MethodCaller
    from nekro.extensions.mcp.follower import McpServers
    from nekro.extensions.plugin_pages.hosts import PluginHosts
    from nekro.plugins.commands import CommandTable
    from nekro.plugins.entries import MethodEntry
    from nekro.plugins.hooks import HookFailure, PluginHost
    from nekro.plugins.lanes import LaneChooser
    from nekro.plugins.loader import LoadedPlugins
    from nekro.plugins.registry import LoadedRegistry
    from nekro.sandbox.manager import SandboxManager
    from nekro.wire.invocation import Signer
    from storage.engine import Database
    from storage.files import DataAreas, UploadAreas
    from storage.repositories.rounds import Round
    from storage.transaction import Transaction
    from workers.calls.built_in_targets import BuiltInTargets
    from workers.calls.claims import CallClaims
    from workers.calls.handler import CallHandler
    from workers.calls.progress import ProgressAnnouncer
    from workers.calls.remote_hooks import ForwardedHooks, HookForwarder
    from workers.calls.targets import CodeTarget, CommandLines, MethodTargets
    from workers.calls.webhooks import WebhookTargets
    from workers.jobs.runner import JobRunner
    from workers.ops.sweeper import Sweeper
    from workers.plugins.initialisation import PluginStates
    from workers.plugins.loop_watchdog import LoopWatchdog
    from workers.plugins.pinned import PinnedOwner
    from workers.plugins.publication import CataloguePublisher
    from workers.plugins.reload import PluginReloader

__all__ = ["CALLER", "GATEWAY", "Parts"]

#: Role of a process that calls methods and imports no plugin: a command.
CALLER: Final = "cli"
#: Role of a gateway: a caller that runs no code either.
GATEWAY: Final = "gateway"


@dataclass(kw_only=True)
class Parts(ABC):
    """The services of one process; ``nekro.app.composition`` adds their start and end."""

    #: With every URL resolved.
    settings: Settings
    #: ``CALLER``, ``GATEWAY`` or the lane that the process serves.
    role: str
    #: In callers it is empty until they have read the catalogue.
    registry: Registry
    database: Database
    #: What a worker imported; None in callers, which import no plugin.
    _loaded: LoadedPlugins | None = None
    _caller: MethodCaller | None = None
    _sandboxes: SandboxManager | None = None
    _pinned_owner: PinnedOwner | None = None
    #: Called when methods may have been added; a worker lets Celery know them.
    on_new_methods: Callable[[], None] = lambda: None
    #: Called with what a worker that starts does next.
    on_progress: Callable[[str], None] = lambda _: None

    @shared_property
    def app(self) -> NekroApp:
        """The Celery application."""
        from broker_config.app import create_app

        return create_app(self.settings, lane=self.role if self.is_worker else None)

    @shared_property
    def node(self) -> str:
        """Name of this process in rows and logs: role, host and process id."""
        return f"{self.role}@{socket.gethostname()}:{os.getpid()}"

    @property
    def is_worker(self) -> bool:
        """Whether this process imports plugins; callers read the catalogue instead."""
        return self.role not in (CALLER, GATEWAY)

    @property
    def loaded(self) -> LoadedPlugins:
        """The imported plugins.

        Raises:
            RuntimeNotBoundError: this process is not a worker.
        """
        if self._loaded is None:
            raise RuntimeNotBoundError(f"a process of role {self.role} imports no plugins")
        return self._loaded

    @property
    def loaded_registry(self) -> LoadedRegistry:
        """The registry of the imported plugins.

        Raises:
            RuntimeNotBoundError: this process is not a worker.
        """
        from nekro.plugins.registry import LoadedRegistry

        if not isinstance(self.registry, LoadedRegistry):
            raise RuntimeNotBoundError(f"a process of role {self.role} imports no plugins")
        return self.registry

    @shared_property
    def catalogue(self) -> CatalogueReader:
        """Reads what the fleet serves."""
        from nekro.app.catalogue import CatalogueReader

        return CatalogueReader(self.database)

    @shared_property
    def publisher_of_catalogue(self) -> CataloguePublisher:
        """Publishes what this worker serves."""
        from nekro_agent.services.timer.timer_service import callback_timers
        from workers.plugins.publication import CataloguePublisher

        return CataloguePublisher(
            self.database,
            self.background,
            self.leases,
            loaded=self.loaded,
            registry=self.loaded_registry,
            name=self.node,
            lane=self.role,
            lease_seconds=self.settings.agent.lease_seconds,
            sites=lambda: self.plugin_hosts.addresses,
            timers=callback_timers,
        )

    @shared_property
    def plugin_hosts(self) -> PluginHosts:
        """Serves the HTTP routes and pages of plugins."""
        from nekro.extensions.plugin_pages.hosts import PluginHosts

        settings = self.settings.workers
        return PluginHosts(
            role=self.role,
            key=resolve_signing_key(self.settings).get_secret_value(),
            database=self.database,
            plugins=lambda: self.host.plugins,
            is_pinned=self.lanes.is_pinned,
            may_run_here=self.may_run_here,
            watchdog=self.watchdog,
            address=settings.http_address,
            advertised=settings.http_advertise,
            on_failure=self.loaded.add_error,
        )

    @shared_property
    def hooks(self) -> MessageHooks:
        """The hooks of messages and resets: here in a worker, else on the workers."""
        return self.host if self.is_worker else self.fleet_hooks

    @shared_property
    def fleet_hooks(self) -> FleetHooks:
        """Runs hooks and other functions of plugins on workers.

        Raises:
            RuntimeNotBoundError: this process does not call methods, or has not started.
        """
        from nekro.app.calls.fleet_calls import FleetHooks

        return FleetHooks(self.registry, self.caller, self.plugin_tasks)

    @property
    def caller(self) -> MethodCaller:
        """Sends calls.

        Raises:
            RuntimeNotBoundError: this process does not call methods, or has not started.
        """
        if self._caller is None:
            raise RuntimeNotBoundError(f"a process of role {self.role} does not call methods")
        return self._caller

    @shared_property
    def host(self) -> PluginHost:
        """The plugins' lifecycle and hooks."""
        from nekro.plugins.hooks import PluginHost

        return PluginHost(
            self.loaded.plugins,
            remote=self.remote_hooks,
            cleanup_seconds=self.settings.workers.cleanup_seconds,
        )

    @shared_property
    def remote_hooks(self) -> HookForwarder:
        """Forwards hooks of pinned plugins to their owners."""
        from nekro.broker.calls import MethodCaller
        from workers.calls.remote_hooks import HookForwarder

        return HookForwarder(
            background=self.background,
            make_caller=lambda: MethodCaller(lambda: self.app, self.settings),
            tasks=self.plugin_tasks,
            may_run_here=self.may_run_here,
        )

    @shared_property
    def forwarded_hooks(self) -> ForwardedHooks:
        """Runs hooks of the pinned plugins that this process owns."""
        from workers.calls.remote_hooks import ForwardedHooks

        return ForwardedHooks(
            self.host, self.loaded_registry, home_of=self._queue_of_home, try_server=self._try_mcp_server
        )

    async def _try_mcp_server(self, plugin_key: str) -> dict[str, Any]:
        from nekro.extensions.mcp.follower import try_server

        return await try_server(self.mcp, plugin_key)

    @shared_property
    def plugin_tasks(self) -> PluginTasks:
        """Sends commands and hooks to the processes of their plugins."""
        from nekro.app.calls.fleet_calls import PluginTasks

        return PluginTasks(
            self.lanes, refresh_lanes=self.refresh, return_bytes=self.settings.sandbox.return_bytes
        )

    @shared_property
    def areas(self) -> DataAreas:
        """Directories of chats, sandboxes and plugins."""
        from storage.files import DataAreas

        return DataAreas(self.settings.data_dir, uploads=self.upload_areas)

    @shared_property
    def file_ids(self) -> FileIds:
        """Ids of chats' files."""
        from nekro.app.chats.attachments import FileIds

        return FileIds(resolve_signing_key(self.settings).get_secret_value())

    @shared_property
    def upload_areas(self) -> UploadAreas:
        """Names of the chats' upload directories."""
        from storage.files import UploadAreas

        key = resolve_signing_key(self.settings).get_secret_value()
        return UploadAreas(self.settings.database, self.settings.data_dir, key=key)

    @shared_property
    def publisher(self) -> EventPublisher:
        """Publishes to ``agent.events``."""
        from nekro.app.chats.publisher import EventPublisher
        from nekro.app.extensions import adapters

        return EventPublisher(self.app, adapters=adapters(self.settings))

    @shared_property
    def background(self) -> BackgroundLoop:
        """An event loop that runs no plugin code."""
        from nekro.app.background import BackgroundLoop

        return BackgroundLoop(self.database)

    @shared_property
    def leases(self) -> LeaseKeeper:
        """Renews the leases that this process holds on rows."""
        from nekro.app.leases import LeaseKeeper

        return LeaseKeeper(self.database, self.background)

    @shared_property
    def clocks(self) -> ClockWatch:
        """Keeps the shared time correct."""
        from nekro.app.clock_watch import ClockWatch

        return ClockWatch(self.database, self.settings.broker, self.background)

    @shared_property
    def announcer(self) -> ProgressAnnouncer:
        """Publishes the progress of running work to Celery."""
        from workers.calls.progress import ProgressAnnouncer

        return ProgressAnnouncer(self.app)

    @shared_property
    def firings(self) -> TimerFirings:
        """The effects of a timer's firing."""
        from nekro.app.timers import TimerFirings

        return TimerFirings(self.publisher, debounce_seconds=self.settings.agent.debounce_seconds)

    @shared_property
    def job_runner(self) -> JobRunner:
        """Executes background jobs on a worker of lane ``long``."""
        from workers.jobs.runner import JobRunner
        from workers.jobs.running import RunningJobs

        running = RunningJobs(
            self.leases,
            self.background,
            lease_seconds=self.settings.agent.lease_seconds,
            announce=self.announcer.announce,
            publisher=self.publisher,
        )
        return JobRunner(
            running=running,
            plugin_of=lambda key: next((p for p in self.host.plugins if p.key == key), None),
            publisher=self.publisher,
            redactor=self.redactor,
            worker_name=self.node,
        )

    @shared_property
    def signer(self) -> Signer:
        """Signs and verifies invocations."""
        from nekro.wire.invocation import Signer

        return Signer.from_text(resolve_signing_key(self.settings).get_secret_value())

    @shared_property
    def redactor(self) -> Redactor:
        """Removes secrets and host paths from texts that leave the host."""
        from nekro.base.redaction import Redactor

        key = resolve_signing_key(self.settings).get_secret_value()
        return Redactor((*self.settings.secret_values(), key), host_paths=(self.settings.data_dir,))

    @shared_property
    def lanes(self) -> LaneChooser:
        """Chooses the lane of each method's calls."""
        from nekro.plugins.lanes import LaneChooser

        chooser = LaneChooser()
        self.declare_pinned_plugins(chooser)
        return chooser

    def declare_pinned_plugins(self, chooser: LaneChooser) -> None:
        """Let calls of plugins that are pinned by their declaration or by settings use their queues."""
        declared = {plugin.key for plugin in self.registry.plugins if plugin.pinned}
        declared |= set(self.settings.workers.pinned_plugins)
        self._declare_queues(declared)
        chooser.declare(declared)

    def _declare_queues(self, plugin_keys: Iterable[str]) -> None:
        """Declare the queues of pinned plugins; a caller that publishes to Redis itself needs none."""
        from nekro.plugins.lanes import declare_pinned

        keys = list(plugin_keys)
        if keys and (self.is_worker or not is_redis(self.settings.broker.url or "")):
            declare_pinned(self.app, keys)

    @shared_property
    def lane_overrides(self) -> LaneOverrides:
        """Lane overrides set by the watchdog or an operator."""
        from nekro.app.catalogue import LaneOverrides

        return LaneOverrides(
            self.database, lambda: self.background, self.lanes, on_pinned=self._declare_queues
        )

    async def refresh(self) -> None:
        """Read the lane overrides, and in callers the catalogue, if they were not read within a second."""
        await self.lane_overrides.refresh()

    @shared_property
    def states(self) -> PluginStates:
        """Applies operators' decisions which plugins are enabled."""
        from workers.plugins.initialisation import PluginStates

        return PluginStates(
            self.host,
            self.leases,
            owner=self.node,
            disabled=self.settings.plugins.disabled,
            may_run_here=self.may_run_here,
            on_change=self.plugins_changed,
            on_failure=self._record_failure,
        )

    @shared_property
    def reloader(self) -> PluginReloader:
        """Reloads plugins whose files change."""
        from workers.plugins.reload import PluginReloader

        return PluginReloader(
            self.loaded,
            self.host,
            self.leases,
            self.lanes,
            owner=self.node,
            may_run_here=self.may_run_here,
            is_wanted=self.states.wants,
            on_change=self.plugins_changed,
        )

    @shared_property
    def mcp(self) -> McpServers:
        """The plugins of MCP servers."""
        from nekro.extensions.mcp.follower import McpServers

        return McpServers(
            self.settings,
            self.database,
            self.loaded,
            self.host,
            serves=self.role in (Lane.METHODS.value, Lane.PINNED.value),
            may_run_here=self.may_run_here,
            is_wanted=self.states.wants,
            on_change=self.plugins_changed,
        )

    def plugins_changed(self) -> None:
        """Offer what the plugins of the host have now."""
        self.loaded_registry.serve(self.host.plugins)
        self.declare_pinned_plugins(self.lanes)
        self.commands.refresh(self.host.plugins)
        self.on_new_methods()

    def pinned_owner(self, *, consume: Callable[[str], None]) -> PinnedOwner:
        """Build the competitor for pinned plugins; ``consume`` starts serving a queue."""
        from workers.plugins.pinned import PinnedOwner

        self._pinned_owner = PinnedOwner(
            leases=self.leases,
            host=self.host,
            lanes=self.lanes,
            owner=self.node,
            lease_seconds=self.settings.agent.lease_seconds,
            is_fallback=self.role != Lane.PINNED.value,
            refresh=self.lane_overrides.refresh,
            consume=consume,
            run_start_hooks=self.states.run_start_hooks,
            on_failure=self._record_failure,
        )
        return self._pinned_owner

    def _record_failure(self, failure: HookFailure) -> None:
        self.loaded.add_error(failure.plugin_key, failure.text)

    def may_run_here(self, key: str) -> bool:
        """Whether this process may run a plugin: it owns the plugin, or the plugin is not pinned."""
        return self._queue_of_home(key) is None

    def _queue_of_home(self, key: str) -> str | None:
        """Return the queue of a plugin that is pinned to another process; None if it may run here."""
        if not self.lanes.is_pinned(key) or (self._pinned_owner and self._pinned_owner.holds(key)):
            return None
        return self.lanes.lane_of_plugin(key)

    @shared_property
    def watchdog(self) -> LoopWatchdog | None:
        """Watches the loop that runs methods; None where each call has a thread or no methods run."""
        from workers.plugins.loop_watchdog import LoopWatchdog

        if self.role in (Lane.LONG.value, Lane.ROUNDS.value) or not self.is_worker:
            return None
        give_up_seconds = self.settings.agent.lease_seconds
        return LoopWatchdog(on_block=self.lane_overrides.record, give_up_seconds=give_up_seconds)

    @shared_property
    def claims(self) -> CallClaims:
        """Claims and outcomes of calls with an effect."""
        from nekro.app.approvals.requests import ApprovalCheck
        from workers.calls.claims import CallClaims

        lease_seconds = self.settings.agent.lease_seconds
        return CallClaims(
            self.leases,
            self.publisher,
            self.host,
            lease_seconds=lease_seconds,
            confirm=ApprovalCheck(self.approval_seal).confirm,
        )

    @shared_property
    def call_handler(self) -> CallHandler:
        """Handles calls on a worker."""
        from nekro.app.calls.detached import CallEnds
        from workers.calls.handler import CallHandler

        return CallHandler(
            signer=self.signer,
            claims=self.claims,
            ends=CallEnds(self.database, self.publisher),
            redactor=self.redactor,
            sandbox_settings=self.settings.sandbox,
            worker_name=self.node,
        )

    @shared_property
    def methods(self) -> MethodTargets:
        """The methods that calls run."""
        from workers.calls.progress import CallReports
        from workers.calls.targets import MethodTargets

        return MethodTargets(
            registry=self.loaded_registry,
            reports=CallReports(
                self.database,
                self.background,
                self.announcer,
                self.publisher,
                worker_name=self.node,
            ),
            home_of=self._queue_of_home,
            watchdog=self.watchdog,
        )

    @shared_property
    def built_in_methods(self) -> BuiltInTargets:
        """The methods that every chat's code has without a plugin."""
        from workers.calls.built_in_targets import BuiltInTargets

        return BuiltInTargets(
            self.database,
            self.loaded_registry,
            self.host,
            keep_awake=self.settings.plugins.keep_awake,
            redact=self.redactor,
        )

    @shared_property
    def webhooks(self) -> WebhookTargets:
        """The webhooks that calls run."""
        from workers.calls.webhooks import WebhookTargets

        return WebhookTargets(self.loaded_registry, home_of=self._queue_of_home, watchdog=self.watchdog)

    @shared_property
    def commands(self) -> CommandTable:
        """The plugins' commands."""
        from nekro.plugins.commands import CommandTable

        return CommandTable(self.loaded.plugins)

    @shared_property
    def command_lines(self) -> CommandLines:
        """The command lines that calls run."""
        from workers.calls.targets import CommandLines

        return CommandLines(self.commands, self.redactor, return_bytes=self.settings.sandbox.return_bytes)

    @shared_property
    def command_sender(self) -> CommandSender:
        """Sends command lines to workers.

        Raises:
            RuntimeNotBoundError: this process does not call methods, or has not started.
        """
        from nekro.app.calls.fleet_calls import CommandSender
        from storage.kv import SqlKeyValueStore

        return CommandSender(
            registry=self.registry,
            caller=self.caller,
            tasks=self.plugin_tasks,
            store=SqlKeyValueStore(self.database, self.settings.store),
        )

    @shared_property
    def detacher(self) -> CallDetacher:
        """Writes calls whose callers stop waiting."""
        from nekro.app.calls.detached import CallDetacher

        return CallDetacher(self.database, self.publisher)

    @shared_property
    def dispatcher(self) -> Dispatcher:
        """Sends calls to workers.

        Raises:
            RuntimeNotBoundError: this process does not call methods, or has not started.
        """
        from nekro.app.calls.dispatch import Dispatcher

        return Dispatcher(
            self.caller,
            self.registry,
            self.lanes,
            self.settings.workers,
            refresh=self.refresh,
            detacher=lambda: self.detacher,
            approvals=lambda: self.approval_requests,
        )

    @shared_property
    def approval_seal(self) -> ApprovalSeal:
        """Signs approvals of calls."""
        from nekro.app.approvals.requests import ApprovalSeal

        return ApprovalSeal(resolve_signing_key(self.settings))

    @shared_property
    def approval_requests(self) -> ApprovalRequests:
        """Records calls that wait for approval."""
        from nekro.app.approvals.requests import ApprovalRequests

        return ApprovalRequests(
            self.database,
            self.publisher,
            self.settings.approval,
            signer=self.signer,
            seal=self.approval_seal,
        )

    @abstractmethod
    async def find_method(self, name: str) -> MethodEntry:
        """Return the method of a full name, function name or alias, as the fleet serves it now."""

    @shared_property
    def approval_decisions(self) -> ApprovalDecisions:
        """Decides on calls that wait for approval."""
        from nekro.app.approvals.decisions import ApprovalDecisions
        from nekro.app.calls.records import lane_seconds

        return ApprovalDecisions(
            self.database,
            self.publisher,
            self.settings.approval,
            signer=self.signer,
            seal=self.approval_seal,
            find_method=self.find_method,
            lane_seconds=partial(lane_seconds, self.settings.workers),
        )

    @shared_property
    def runs(self) -> CodeRuns:
        """Runs code that calls methods in sandboxes."""
        from nekro.app.rounds.runs import CodeRuns

        return CodeRuns(
            self.dispatcher,
            self.registry,
            self.sandboxes,
            self.spending,
            wall_seconds=self.settings.sandbox.wall_seconds,
        )

    @shared_property
    def code_target(self) -> CodeTarget:
        """Runs code that other processes send to this rounds worker."""
        from workers.calls.targets import CodeTarget

        return CodeTarget(self.runs, self.publisher, wall_seconds=self.settings.sandbox.wall_seconds)

    @shared_property
    def remote_runs(self) -> RemoteRuns:
        """Sends code to rounds workers.

        Raises:
            RuntimeNotBoundError: this process does not call methods, or has not started.
        """
        from nekro.app.rounds.runs import RemoteRuns

        return RemoteRuns(self.caller, self.catalogue, self.settings)

    @shared_property
    def intake(self) -> MessageIntake:
        """Receives messages from people."""
        from nekro.app.approvals.chat_lines import ChatDecisions
        from nekro.app.rounds.intake import MessageIntake
        from nekro.extensions.mcp.answers import ChatAnswers

        return MessageIntake(
            self.database,
            self.publisher,
            self.hooks,
            self.stopper,
            self.settings.agent,
            readers=(
                ChatDecisions(self.database, self.settings.approval, lambda: self.approval_decisions),
                ChatAnswers(self.database),
            ),
        )

    @shared_property
    def ledger(self) -> RoundLedger:
        """Records the states of rounds."""
        from nekro.app.rounds.ledger import RoundLedger

        return RoundLedger(
            self.database,
            self.publisher,
            self.settings.agent,
            max_attempts=self.settings.broker.max_deliveries,
            keeps_variables=self.settings.sandbox.keep_variables,
            redact=self.redactor,
            settle_interrupted=self._settle_interrupted,
        )

    async def _settle_interrupted(self, transaction: Transaction, orphan: Round) -> None:
        # Imported here: few processes end the rounds of a dead worker, and it imports the models' clients.
        from nekro.app.model_meters import RoundBudgets

        await RoundBudgets(self.spending, self.settings).settle_interrupted(transaction, orphan)

    @shared_property
    def spending(self) -> Spending:
        """Counts what is spent, and refuses what exceeds a budget."""
        from nekro.app.spending import Spending

        return Spending(self.database, self.publisher, self.settings.budgets)

    @shared_property
    def model_contexts(self) -> ModelContexts:
        """Knows how many tokens the models of the groups read."""
        from broker_config.model_groups import group_or_default
        from nekro.agent.room import ModelContexts

        return ModelContexts(self.settings.agent, partial(group_or_default, self.settings))

    @shared_property
    def summaries(self) -> ChatSummaries:
        """Writes the summaries of chats."""
        from nekro.agent.llm import create_models
        from nekro.app.model_meters import SummaryMeter
        from nekro.app.rounds.summaries import ChatSummaries

        return ChatSummaries(
            self.database,
            self.leases,
            self.model_contexts,
            # Its own client: a summary uses no connection that a round waits for.
            partial(create_models, self.settings),
            self.settings.agent,
            meter=SummaryMeter(self.spending, self.settings),
            owner=self.node,
        )

    @shared_property
    def stopper(self) -> RoundStopper:
        """Stops the rounds of a chat."""
        from nekro.app.rounds.stop import RoundStopper

        return RoundStopper(self.leases, self.ledger, owner=self.node)

    def sweeper(self) -> Sweeper:
        """Build the sweeper; every worker has one, and a lease lets one sweep at a time."""
        from workers.jobs.downloads import DownloadSweep
        from workers.ops.sweeper import CallSweep, Sweeper, WatchSweep
        from workers.ops.sweeps import ApprovalSweep, JobSweep, RetentionSweep, TimerSweep, UploadSweep

        return Sweeper(
            self.database,
            self.leases,
            self.publisher,
            self.settings.agent,
            owner=self.node,
            sweeps=(
                CallSweep(
                    self.database,
                    self.publisher,
                    self.signer,
                    waiting_seconds=self.settings.agent.unclaimed_seconds,
                ).sweep,
                ApprovalSweep(self.database, self.approval_decisions).sweep,
                TimerSweep(self.database, self.firings).sweep,
                JobSweep(self.database, self.publisher, self.settings.agent).sweep,
                DownloadSweep(self.database, data_dir=self.settings.data_dir).sweep,
                RetentionSweep(self.database, self.settings.retention).sweep,
                UploadSweep(self.settings.retention, data_dir=self.settings.data_dir).sweep,
                WatchSweep(self.app, self.settings.broker).sweep,
            ),
        )

    async def sandboxes(self) -> SandboxManager:
        """Return the started sandbox manager.

        Raises:
            SandboxUnavailableError: this host has no isolation that satisfies the settings.
            RuntimeNotBoundError: this process is a gateway.
        """
        if self.role == GATEWAY:
            raise RuntimeNotBoundError("a gateway runs no code; it sends code to rounds workers")
        if self._sandboxes is None:
            # Imported here because it takes a tenth of a worker's memory and few workers run code.
            from nekro.sandbox.manager import SandboxManager

            manager = SandboxManager(
                self.settings.sandbox, self.areas, packages_dir=self.settings.data_dir / "layers"
            )
            await manager.start()
            self._sandboxes = manager
        return self._sandboxes
