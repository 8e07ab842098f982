"""The services of a worker: those of a caller, and what imports, runs and publishes plugins.

Read top to bottom: what is built later uses what is built before. Only what few workers need is built, and
imported, at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

from broker_config.embedded import make_data_dir, resolve_settings
from broker_config.settings import Settings
from nekro.app.approvals.requests import ApprovalCheck
from nekro.app.calls.fleet_calls import MessageHooks
from nekro.app.chats.writer import TimerFirings
from nekro.app.clock_watch import ClockWatch
from nekro.app.extensions import imported
from nekro.app.extensions import loaded as loaded_extensions
from nekro.app.services import Services
from nekro.base.shared_property import shared_property
from nekro.broker.calls import MethodCaller
from nekro.plugins.commands import CommandTable
from nekro.plugins.configuration import core_config, package_policy, plugin_dirs
from nekro.plugins.entries import PluginStatus
from nekro.plugins.hooks import HookFailure, PluginHost
from nekro.plugins.loader import LoadedPlugins, PreparedPlugins, load_plugins
from nekro.plugins.registry import LoadedRegistry
from nekro_agent import runtime
from nekro_agent.methods import Lane
from nekro_agent.services.timer.timer_service import callback_timers
from storage.engine import Database
from storage.migrate import require_schema
from workers.calls.claims import CallClaims
from workers.calls.handler import CallEnds, CallHandler
from workers.calls.progress import CallReports, ProgressAnnouncer
from workers.calls.remote_hooks import ForwardedHooks, HookForwarder
from workers.calls.targets import CodeTarget, CommandLines, MethodTargets
from workers.calls.webhooks import WebhookTargets
from workers.extensions import WorkerPart
from workers.jobs.downloads import DownloadSweep
from workers.ops.sweeper import CallSweep, Sweep, Sweeper, WatchSweep
from workers.ops.sweeps import (
    ApprovalSweep,
    CollectionSweep,
    JobSweep,
    RetentionSweep,
    StoredFileSweep,
    TimerSweep,
    UploadSweep,
    WaitSweep,
)
from workers.plugins.initialisation import PluginStates, start_plugins
from workers.plugins.loop_watchdog import LaneMover, LoopWatchdog
from workers.plugins.publication import CataloguePublisher
from workers.plugins.reload import PluginReloader
from workers.sdk_runtime import runtime_of

if TYPE_CHECKING:
    from workers.calls.built_in_targets import BuiltInTargets
    from workers.jobs.runner import JobRunner
    from workers.plugins.pinned import PinnedOwner
    from workers.plugins.pinned_files import PinnedFiles
    from workers.rounds.ledger import RoundLedger

__all__ = ["WorkerServices"]


class WorkerServices(Services):
    """The services of one worker; call ``load``, then ``start`` on the event loop that will use them."""

    is_worker: ClassVar = True

    def __init__(
        self,
        settings: Settings,
        *,
        lane: str,
        loaded: LoadedPlugins,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Build what needs no event loop.

        Args:
            settings: with every URL resolved.
            loaded: the imported plugins.
            on_progress: called with what the worker does next, until ``start`` has ended.
        """
        dirs = plugin_dirs(settings.files)
        registry = LoadedRegistry(
            loaded.plugins, long_methods=settings.workers.long_methods, approval=settings.approval, dirs=dirs
        )
        if dirs is not None and all(record.status is not PluginStatus.FAILED for record in loaded.records):
            dirs.require_known([plugin.key for plugin in loaded.plugins])
        database = Database(settings.database, settings.data_dir)
        super().__init__(settings, role=lane, database=database, registry=registry)
        self._plugin_dirs = dirs
        if dirs is not None:
            self.directory_policy_of, dirs.is_pinned = dirs.policy_of, self.lanes.is_pinned
        self.loaded, self.loaded_registry, self.on_progress = loaded, registry, on_progress
        #: Called when methods may have been added; a worker lets Celery know them.
        self.on_new_methods: Callable[[], None] = lambda: None
        self._pinned_owner: PinnedOwner | None = None
        self.declare_pinned_plugins()
        self.clocks = ClockWatch(database, settings.broker, self.background)
        self.announcer = ProgressAnnouncer(self.app)
        self.closers["announcer"] = self.announcer.close
        lease_seconds, return_bytes = settings.agent.lease_seconds, settings.sandbox.return_bytes

        # Plugins: their hooks, here and in the processes that own pinned ones; which of them are enabled.
        self.remote_hooks = HookForwarder(
            background=self.background,
            make_caller=lambda: MethodCaller(lambda: self.app, settings),
            tasks=self.plugin_tasks,
            may_run_here=self.may_run_here,
        )
        self.closers["remote hooks"] = self.remote_hooks.close
        self.host = PluginHost(
            loaded.plugins, remote=self.remote_hooks, cleanup_seconds=settings.workers.cleanup_seconds
        )
        self.closers["plugins"] = self.host.stop
        self.commands = CommandTable(loaded.plugins)
        self.states = PluginStates(
            self.host,
            self.leases,
            owner=self.node,
            disabled=settings.plugins.disabled,
            may_run_here=self.may_run_here,
            on_change=self.plugins_changed,
            on_failure=self._record_failure,
        )
        self.reloader = PluginReloader(
            loaded,
            self.host,
            self.leases,
            self.lanes,
            owner=self.node,
            may_run_here=self.may_run_here,
            is_wanted=self.states.wants,
            on_change=self.plugins_changed,
        )
        self.closers["plugin states"] = self._stop_changes
        #: Watches the loop that runs methods; None where each call has a thread or no methods run.
        self.watchdog: LoopWatchdog | None = None
        if lane not in (Lane.LONG.value, Lane.ROUNDS.value):
            mover = LaneMover(self.database, lambda: self.background, self.lanes)
            self.watchdog = LoopWatchdog(on_block=mover.record, give_up_seconds=lease_seconds)
        self.extensions: list[WorkerPart] = [
            imported(one.worker)(self) for one in loaded_extensions(settings) if one.worker is not None
        ]
        self.closers["extensions"] = self._close_extensions
        self.publisher_of_catalogue = CataloguePublisher(
            database,
            self.background,
            self.leases,
            loaded=loaded,
            registry=registry,
            name=self.node,
            lane=lane,
            lease_seconds=lease_seconds,
            sites=lambda: {key: at for part in self.extensions for key, at in part.sites.items()},
            timers=callback_timers,
        )

        # Calls: who handles them, and what they run.
        self.claims = CallClaims(
            self.leases,
            self.publisher,
            self.host,
            lease_seconds=lease_seconds,
            confirm=ApprovalCheck(self.approval_seal).confirm,
        )
        self.call_handler = CallHandler(
            signer=self.signer,
            claims=self.claims,
            ends=CallEnds(database, self.publisher),
            redactor=self.redactor,
            sandbox_settings=settings.sandbox,
            worker_name=self.node,
        )
        reports = CallReports(
            database, self.background, self.announcer, self.publisher, worker_name=self.node
        )
        self.methods = MethodTargets(
            registry=registry, reports=reports, home_of=self._queue_of_home, watchdog=self.watchdog
        )
        self.webhooks = WebhookTargets(registry, home_of=self._queue_of_home, watchdog=self.watchdog)
        self.command_lines = CommandLines(self.commands, self.redactor, return_bytes=return_bytes)
        self.forwarded_hooks = ForwardedHooks(
            self.host,
            registry,
            home_of=self._queue_of_home,
            of_extensions={name: hook for part in self.extensions for name, hook in part.hooks.items()},
        )

    @classmethod
    def load(
        cls,
        settings: Settings,
        *,
        role: str,
        on_progress: Callable[[str], None] = lambda _: None,
        prepared: PreparedPlugins | None = None,
    ) -> Self:
        """Import the plugins, and build the services; it leaves no connection open.

        Args:
            role: the lane of the worker.
            on_progress: called with what the worker does next, until ``start`` has ended.
            prepared: the plugins that a worker has when it is forked.

        Raises:
            SettingsError: a setting is wrong or the signing key cannot be read.
            StorageUnavailableError: the configurations of plugins could not be brought from a store.
        """
        settings = resolve_settings(settings)
        make_data_dir(settings)
        if settings.files.in_store and prepared is None:
            from nekro.app.areas.synced import bring_configs

            on_progress("bringing the configurations of plugins")
            bring_configs(settings)
        loaded = load_plugins(
            settings.plugins.dirs,
            disabled=settings.plugins.disabled,
            shipped=settings.plugins.load_shipped,
            data_dir=settings.data_dir,
            packages=package_policy(settings),
            core=core_config(settings),
            patience_seconds=settings.plugins.start_seconds,
            on_progress=on_progress,
            prepared=prepared,
        )
        return cls(settings, lane=role, loaded=loaded, on_progress=on_progress)

    async def start(self) -> None:
        """Bind the SDK's runtime, run the plugins' init hooks, and publish what this worker serves.

        Rounds workers listen for results of calls.

        Raises:
            StorageUnavailableError: the database does not answer or is not migrated.
        """
        self.on_progress("connecting to the database")
        await require_schema(self.database)
        await self.clocks.compare()
        self.clocks.start()
        runtime.bind(runtime_of(self, self.host))
        self.closers["runtime"] = runtime.unbind
        self.areas.follow_configs()
        for part in self.extensions:
            await part.add_plugins()
        if self.role == Lane.ROUNDS.value:
            await self.start_calling()
        if self.watchdog is not None:
            self.closers["watchdog"] = self.watchdog.stop
            self.watchdog.start()
        await start_plugins(
            self.host,
            self.loaded,
            self.leases,
            owner=self.node,
            lanes=self.lanes,
            overrides=self.lane_overrides,
            states=self.states,
            patience_seconds=self.settings.plugins.start_seconds,
            on_progress=self.on_progress,
        )
        self.plugins_changed()  # inits may have registered methods and commands
        self.on_progress("connecting to the broker")
        self.states.start()
        self.reloader.start(watches=self.settings.plugins.reload)
        for part in self.extensions:
            await part.start()
        self.closers["catalogue"] = self.publisher_of_catalogue.close
        await self.publisher_of_catalogue.start()
        self.log_start()

    async def _stop_changes(self) -> None:
        await self.states.close()
        await self.reloader.close()

    async def _close_extensions(self) -> None:
        for part in reversed(self.extensions):
            await part.close()

    @property
    def hooks(self) -> MessageHooks:
        """The hooks of messages and resets run here, or in the owners of pinned plugins."""
        return self.host

    def plugins_changed(self) -> None:
        """Offer what the plugins of the host have now."""
        self.loaded_registry.serve(self.host.plugins)
        self.declare_pinned_plugins()
        self.commands.refresh(self.host.plugins)
        self.on_new_methods()

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

    async def home_of_job(self, job_id: str) -> str | None:
        """Return the queue of the process that has the directory of a job's plugin; None if it may run here.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        if not self.settings.files.in_store:
            return None
        await self.lane_overrides.refresh()
        async with self.database.read() as transaction:
            job = await transaction.jobs.find(job_id)
        if job is None or self._queue_of_jobs(job.plugin_key) is None:
            return None
        return self._queue_of_home(job.plugin_key)

    def _queue_of_jobs(self, key: str) -> str | None:
        """Return the queue of the process that runs the jobs of a plugin; None: lane ``long`` does."""
        return self.lanes.lane_of_plugin(key) if self.directory_policy_of(key) == "pinned" else None

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
            files=self._pinned_files(),
        )
        return self._pinned_owner

    def _pinned_files(self) -> PinnedFiles | None:
        if self._plugin_dirs is None:
            return None
        from nekro.app.areas.synced import SyncedAreas
        from workers.plugins.pinned_files import PinnedFiles

        assert isinstance(self.areas, SyncedAreas)  # noqa: S101 - as it is in a store
        return PinnedFiles(
            self.areas, data_dir=self.settings.data_dir, uses_database=self._plugin_dirs.uses_database
        )

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
    def ledger(self) -> RoundLedger:
        """Records the states of the rounds that this worker runs."""
        from workers.rounds.ledger import RoundLedger

        return RoundLedger(self.database, self.publisher, self.endings, redact=self.redactor)

    @shared_property
    def code_target(self) -> CodeTarget:
        """Runs code that other processes send to this rounds worker."""
        return CodeTarget(self.runs, self.publisher, wall_seconds=self.settings.sandbox.wall_seconds)

    def _file_sweeps(self) -> tuple[Sweep, ...]:
        settings = self.settings
        if not settings.files.in_store:
            return (UploadSweep(settings.retention, data_dir=settings.data_dir).sweep,)
        idle_seconds = settings.sandbox.shared_idle_seconds
        return (
            StoredFileSweep(self.database, settings.retention, idle_seconds=idle_seconds).sweep,
            CollectionSweep(self.database, self.background, self.files.store).sweep,
        )

    def sweeper(self) -> Sweeper:
        """Build the sweeper; every worker has one, and a lease lets one sweep at a time."""
        settings, database = self.settings, self.database
        firings = TimerFirings(self.publisher, debounce_seconds=settings.agent.debounce_seconds)
        waiting_seconds = settings.agent.unclaimed_seconds
        return Sweeper(
            database,
            self.leases,
            self.publisher,
            settings.agent,
            owner=self.node,
            sweeps=(
                CallSweep(database, self.publisher, self.signer, waiting_seconds=waiting_seconds).sweep,
                ApprovalSweep(database, self.approval_decisions).sweep,
                WaitSweep(database, self.waits).sweep,
                TimerSweep(database, firings).sweep,
                JobSweep(database, self.publisher, settings.agent, queue_of=self._queue_of_jobs).sweep,
                DownloadSweep(database, data_dir=settings.data_dir, in_store=settings.files.in_store).sweep,
                RetentionSweep(database, settings.retention).sweep,
                *self._file_sweeps(),
                WatchSweep(self.app, settings.broker).sweep,
            ),
        )
