"""The services of a process that calls methods: a command or a gateway; ``workers.services`` adds a worker's.

This is the composition root, which alone chooses implementations. What each `nekro call` needs is built with
the services. Whatever imports SQLAlchemy, Celery or a sandbox is built, and imported, at its first use: a
command needs little of it, and importing all takes longer than a call.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

from loguru import logger

from broker_config.embedded import make_data_dir, resolve_settings, resolve_signing_key
from broker_config.settings import Settings
from broker_config.urls import is_redis
from nekro.app.calls.dispatch import Dispatcher
from nekro.app.calls.records import CallRecords
from nekro.app.catalogue import CatalogueReader, FleetCatalogue, LaneOverrides
from nekro.app.chats.attachments import FileIds
from nekro.base.greenlet_bridge import LEAST_SECONDS, Closing, close_all
from nekro.base.shared_property import shared_property
from nekro.broker.calls import MethodCaller
from nekro.plugins.entry_registry import Registry
from nekro.plugins.lanes import LaneChooser, declare_pinned
from nekro.wire.invocation import Signer, new_id
from nekro.wire.seals import ProgramSecrets, hash_seed
from nekro_agent import layout
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS
from nekro_agent.errors import RuntimeNotBoundError, StorageError
from nekro_agent.ports import ChatInfo
from storage.caller_reads import find_chat
from storage.engine import Database, follow_database_clock

if TYPE_CHECKING:
    from broker_config.app import NekroApp
    from nekro.agent.room import ModelContexts
    from nekro.app.approvals.decisions import ApprovalDecisions
    from nekro.app.approvals.requests import ApprovalRequests, ApprovalSeal
    from nekro.app.areas.synced import SyncedAreas
    from nekro.app.background import BackgroundLoop
    from nekro.app.calls.detached import CallDetacher
    from nekro.app.calls.fleet_calls import CommandSender, FleetHooks, MessageHooks, PluginTasks
    from nekro.app.calls.waits import ProgramWaits
    from nekro.app.chats.files import ChatFiles
    from nekro.app.chats.publisher import EventPublisher
    from nekro.app.leases import LeaseKeeper
    from nekro.app.rounds.continuations import Continuations
    from nekro.app.rounds.endings import RoundEndings
    from nekro.app.rounds.intake import MessageIntake
    from nekro.app.rounds.runs import CodeRuns, RemoteRuns
    from nekro.app.rounds.stop import RoundStopper
    from nekro.app.rounds.summaries import ChatSummaries
    from nekro.app.rounds.turn_replays import TurnReplayer
    from nekro.app.spending import Spending
    from nekro.base.redaction import Redactor
    from nekro.plugins.entries import MethodEntry, PluginEntry
    from nekro.sandbox.manager import SandboxManager
    from nekro_agent.schemas.agent_ctx import AgentCtx
    from storage.files.areas import DataAreas, UploadAreas
    from storage.files.host_files import HostFiles
    from storage.repositories.rounds import Round
    from storage.transaction import Transaction

__all__ = ["CALLER", "GATEWAY", "Services"]

#: Role of a process that calls methods and imports no plugin: a command.
CALLER: Final = "cli"
#: Role of a gateway: a caller that runs no code either.
GATEWAY: Final = "gateway"


class Services:
    """The services of one process; call ``load``, then ``start`` on the event loop that will use them."""

    #: Whether this process imports plugins; callers read the catalogue instead.
    is_worker: ClassVar = False

    def __init__(
        self, settings: Settings, *, role: str, database: Database, registry: Registry | None = None
    ) -> None:
        """Build what needs no event loop.

        Args:
            settings: with every URL resolved.
            role: ``CALLER``, ``GATEWAY`` or the lane that the process serves.
            registry: of a worker; that of a caller is empty until it has read the catalogue.
        """
        self.settings = settings
        self.role = role
        #: Returns what becomes of the directory of a plugin, in a worker where hosts share no disk.
        self.directory_policy_of: Callable[[str], str] = lambda _: ""
        self.database = database
        #: Name of this process in rows and logs: role, host and process id.
        self.node = f"{role}@{socket.gethostname()}:{os.getpid()}"
        #: What ends the services that were built, by their names in ``closings``; some of it blocks.
        self.closers: dict[str, Callable[[], object]] = {"database": database.dispose}
        self.registry = Registry(collect=self._collected) if registry is None else registry
        self.lanes = LaneChooser()
        self.lane_overrides = LaneOverrides(database, self.lanes, on_pinned=self._declare_queues)
        self.catalogue = CatalogueReader(database)
        self._caller: MethodCaller | None = None
        self._sandboxes: SandboxManager | None = None
        #: What the fleet served at the last reading; None in workers.
        self._fleet: FleetCatalogue | None = None
        self._read_at = 0.0

    @classmethod
    def load(cls, settings: Settings, *, role: str) -> Self:
        """Build the services of a caller; opens no connection.

        Args:
            role: ``CALLER`` or ``GATEWAY``.

        Raises:
            SettingsError: a setting is wrong or the signing key cannot be read.
        """
        settings = resolve_settings(settings)
        make_data_dir(settings)
        return cls(settings, role=role, database=Database(settings.database, settings.data_dir))

    async def start(self) -> None:
        """Read what the fleet serves, and listen for results of calls.

        Raises:
            StorageUnavailableError: the database does not answer or is not migrated.
        """
        try:
            if not self.database.is_sqlite:  # SQLite uses the clock of this host
                await follow_database_clock(self.database)
            await self.read_catalogue()
        except StorageError:
            from storage.migrate import require_schema

            await require_schema(self.database)  # says what is wrong if the database is not migrated
            raise
        await self.start_calling()
        self.log_start()

    async def start_calling(self) -> None:
        """Listen for results of calls."""
        ledger = CallRecords(self.database, self.registry)
        self._caller = MethodCaller(lambda: self.app, self.settings, ledger=ledger)
        self.closers["caller"] = self._caller.close
        await self._caller.start()

    def log_start(self) -> None:
        """Log that the services have started."""
        logger.bind(role=self.role, methods=len(self.registry)).debug("services_started")

    async def close(self) -> None:
        """Stop what ``start`` started; safe to call after a partial start."""
        await close_all(self.closings(), seconds=self.settings.workers.close_seconds)

    def closings(self) -> list[Closing]:
        """The cleanup steps of a process, in order; a service that was never built has nothing to end."""
        step = CLOSE_STEP_SECONDS
        limits = {
            "catalogue": step,
            "extensions": 3 * step,
            "plugin states": step,
            "plugins": self.settings.workers.cleanup_seconds + LEAST_SECONDS,
            "watchdog": step,
            "summaries": step,
            "sandboxes": 3 * step,
            "caller": step,
            "remote hooks": step,
            "areas": 3 * step,
            "background loop": 3 * step,
            "announcer": step,
            "publisher": step,
            "app": step,
            "database": 3 * step,
            "upload areas": step,
            "runtime": step,
        }
        return [
            Closing(what=what, cleanup=partial(self._close, what), seconds=seconds)
            for what, seconds in limits.items()
        ]

    async def _close(self, what: str) -> None:
        close = self.closers.get(what)
        if inspect.iscoroutinefunction(close):
            await close()
        elif close is not None:
            await asyncio.to_thread(close)

    async def read_catalogue(self) -> FleetCatalogue:
        """Read what the fleet serves, and use it from now on.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        self._read_at = time.monotonic()
        catalogue = await self.catalogue.read()
        if catalogue is not self._fleet:
            self._fleet = catalogue
            self.registry.replace(catalogue.plugins)
            self.declare_pinned_plugins()
        return catalogue

    async def refresh(self) -> None:
        """Read the lane overrides, and in callers the catalogue, if they were not read within a second."""
        await self.lane_overrides.refresh()
        is_fresh = time.monotonic() - self._read_at < FRESH_SECONDS
        if self.is_worker or (is_fresh and self._fleet is not None and self._fleet.is_live):
            return
        try:
            await self.read_catalogue()
        except StorageError as exc:  # what was read before stays in use
            logger.bind(error=str(exc)).warning("catalogue_not_read")

    async def find_method(self, name: str) -> MethodEntry:
        """Return the method of a full name, function name or alias, as the fleet serves it now.

        Raises:
            MethodNotFoundError, MethodDisabledError: as from ``Registry.find``.
        """
        await self.refresh()
        if name not in self.registry and not self.is_worker:
            await self.read_catalogue()  # a worker may have published it within the last second
        return self.registry.find(name)

    async def _collected(
        self, plugin: PluginEntry, own: list[MethodEntry], ctx: AgentCtx
    ) -> list[MethodEntry]:
        """Let a worker run the hook that selects the methods of a chat's code."""
        return await self.fleet_hooks.collected(plugin, own, ctx)

    def declare_pinned_plugins(self) -> None:
        """Let calls of plugins that are pinned by their declaration or by settings use their queues."""
        declared = {plugin.key for plugin in self.registry.plugins if plugin.pinned}
        declared |= set(self.settings.workers.pinned_plugins)
        self._declare_queues(declared)
        self.lanes.declare(declared)

    def _declare_queues(self, plugin_keys: Iterable[str]) -> None:
        """Declare the queues of pinned plugins; a caller that publishes to Redis itself needs none."""
        keys = list(plugin_keys)
        if keys and (self.is_worker or not is_redis(self.settings.broker.url or "")):
            declare_pinned(self.app, keys)

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
    def dispatcher(self) -> Dispatcher:
        """Sends calls of code; may raise as ``caller`` does."""
        return Dispatcher(
            self.caller,
            self.registry,
            self.lanes,
            self.settings.workers,
            refresh=self.refresh,
            detacher=lambda: self.detacher,
            approvals=lambda: self.approval_requests,
            waits=lambda: self.waits,
            secrets=ProgramSecrets(resolve_signing_key(self.settings)),
        )

    @shared_property
    def app(self) -> NekroApp:
        """The Celery application; a call by way of Redis needs none."""
        from broker_config.app import create_app

        app = create_app(self.settings, lane=self.role if self.is_worker else None)
        self.closers["app"] = app.close
        return app

    @shared_property
    def plugin_tasks(self) -> PluginTasks:
        """Sends commands and hooks to the processes of their plugins."""
        from nekro.app.calls.fleet_calls import PluginTasks

        return PluginTasks(
            self.lanes, refresh_lanes=self.refresh, return_bytes=self.settings.sandbox.return_bytes
        )

    @shared_property
    def fleet_hooks(self) -> FleetHooks:
        """Runs hooks and other functions of plugins on workers; may raise as ``caller`` does."""
        from nekro.app.calls.fleet_calls import FleetHooks

        return FleetHooks(self.registry, self.caller, self.plugin_tasks)

    @property
    def hooks(self) -> MessageHooks:
        """The hooks of messages and resets: here in a worker, else on the workers."""
        return self.fleet_hooks

    @shared_property
    def command_sender(self) -> CommandSender:
        """Sends command lines to workers; may raise as ``caller`` does."""
        from nekro.app.calls.fleet_calls import CommandSender
        from storage.kv import SqlKeyValueStore

        return CommandSender(
            registry=self.registry,
            caller=self.caller,
            tasks=self.plugin_tasks,
            store=SqlKeyValueStore(self.database, self.settings.store),
        )

    @shared_property
    def signing_key(self) -> str:
        """The key that signatures and ids derive from."""
        return resolve_signing_key(self.settings).get_secret_value()

    @shared_property
    def signer(self) -> Signer:
        """Signs and verifies invocations."""
        return Signer.from_text(self.signing_key)

    @shared_property
    def redactor(self) -> Redactor:
        """Removes secrets and host paths from texts that leave the host."""
        from nekro.base.redaction import Redactor

        secrets = (*self.settings.secret_values(), self.signing_key)
        return Redactor(secrets, host_paths=(self.settings.data_dir,))

    @shared_property
    def file_ids(self) -> FileIds:
        """Ids of chats' files."""
        return FileIds(self.signing_key)

    @shared_property
    def upload_areas(self) -> UploadAreas:
        """Names of the chats' upload directories."""
        from storage.files.areas import UploadAreas

        areas = UploadAreas(self.settings.database, self.settings.data_dir, key=self.signing_key)
        self.closers["upload areas"] = areas.dispose
        return areas

    @shared_property
    def areas(self) -> DataAreas | SyncedAreas:
        """Directories of chats, sandboxes and plugins."""
        from storage.files.areas import DataAreas

        areas = DataAreas(self.settings.data_dir, uploads=self.upload_areas)
        if not self.settings.files.in_store:
            return areas
        from nekro.app.areas.synced import SyncedAreas

        synced = SyncedAreas(
            areas, self.files, self.background, self.settings, policy_of=self.directory_policy_of
        )
        self.closers["areas"] = synced.close
        return synced

    @shared_property
    def files(self) -> HostFiles:
        """The areas that this host has of a store; use them on the loop of ``background``.

        Raises:
            SettingsError: ``NEKRO_FILES__URL`` names no store.
        """
        from storage.files.host_files import HostFiles
        from storage.files.stores.opening import open_store

        return HostFiles(
            self.database,
            open_store(self.settings.files.url),
            root=layout.files_dir(self.settings.data_dir),
            cache_bytes=self.settings.files.cache_bytes,
        )

    def files_of(self, chat: ChatInfo) -> ChatFiles:
        """Return the files of a chat; its methods block."""
        from storage.files.areas import DataAreas

        areas = self.areas
        if isinstance(areas, DataAreas):
            from nekro.app.chats.live_files import LiveFiles

            return LiveFiles(self.settings, areas, chat)
        from nekro.app.chats.stored_files import StoredFiles

        return StoredFiles(areas, self.database, chat)

    @shared_property
    def publisher(self) -> EventPublisher:
        """Publishes to ``agent.events``."""
        from nekro.app.chats.publisher import EventPublisher
        from nekro.app.extensions import adapters

        publisher = EventPublisher(self.app, adapters=adapters(self.settings))
        self.closers["publisher"] = publisher.close
        return publisher

    @shared_property
    def background(self) -> BackgroundLoop:
        """An event loop that runs no plugin code."""
        from nekro.app.background import BackgroundLoop

        background = BackgroundLoop(self.database)
        self.closers["background loop"] = background.close
        return background

    @shared_property
    def leases(self) -> LeaseKeeper:
        """Renews the leases that this process holds on rows."""
        from nekro.app.leases import LeaseKeeper

        return LeaseKeeper(self.database, self.background)

    @shared_property
    def detacher(self) -> CallDetacher:
        """Writes calls whose callers stop waiting."""
        from nekro.app.calls.detached import CallDetacher

        return CallDetacher(self.database, self.publisher)

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
    def waits(self) -> ProgramWaits:
        """Begins and ends waits of programs."""
        from nekro.app.calls.waits import ProgramWaits

        settings = self.settings
        return ProgramWaits(
            self.database,
            self.publisher,
            # The wait is deleted with the round that began the program.
            most_seconds=min(settings.agent.park_seconds, settings.retention.rounds_days * 86400),
        )

    @shared_property
    def spending(self) -> Spending:
        """Counts what is spent, and refuses what exceeds a budget."""
        from nekro.app.spending import Spending

        return Spending(self.database, self.publisher, self.settings.budgets)

    @shared_property
    def endings(self) -> RoundEndings:
        """Ends rounds that are stopped, and those of dead workers."""
        from nekro.app.rounds.endings import RoundEndings

        return RoundEndings(
            self.database,
            self.publisher,
            self.settings.agent,
            max_attempts=self.settings.broker.max_deliveries,
            keeps_variables=self.settings.sandbox.keep_variables,
            settle_interrupted=self._settle_interrupted,
        )

    async def _settle_interrupted(self, transaction: Transaction, orphan: Round) -> None:
        # Imported here: few processes end the rounds of a dead worker, and it imports the models' clients.
        from nekro.app.model_meters import RoundBudgets

        await RoundBudgets(self.spending, self.settings).settle_interrupted(transaction, orphan)

    @shared_property
    def stopper(self) -> RoundStopper:
        """Stops the rounds of a chat."""
        from nekro.app.rounds.stop import RoundStopper

        return RoundStopper(self.leases, self.endings, owner=self.node)

    @shared_property
    def intake(self) -> MessageIntake:
        """Receives messages from people."""
        from nekro.app.approvals.chat_lines import ChatDecisions
        from nekro.app.extensions import imported, loaded
        from nekro.app.rounds.intake import MessageIntake

        decisions = ChatDecisions(self.database, self.settings.approval, lambda: self.approval_decisions)
        parts = [part for extension in loaded(self.settings) for part in extension.readers]
        return MessageIntake(
            self.database,
            self.publisher,
            self.hooks,
            self.stopper,
            self.settings.agent,
            readers=(decisions, *(imported(part)(self.database) for part in parts)),
        )

    @shared_property
    def model_contexts(self) -> ModelContexts:
        """Knows how many tokens the models of the groups read."""
        from broker_config.model_groups import group_or_default
        from nekro.agent.room import ModelContexts

        return ModelContexts(self.settings.agent, partial(group_or_default, self.settings))

    @shared_property
    def summaries(self) -> ChatSummaries:
        """Writes the summaries of chats."""
        from nekro.agent.llm.clients import create_models
        from nekro.app.model_meters import SummaryMeter
        from nekro.app.rounds.summaries import ChatSummaries

        summaries = ChatSummaries(
            self.database,
            self.leases,
            self.model_contexts,
            # Its own client: a summary uses no connection that a round waits for.
            partial(create_models, self.settings),
            self.settings.agent,
            meter=SummaryMeter(self.spending, self.settings),
            owner=self.node,
        )
        self.closers["summaries"] = summaries.close
        return summaries

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

            settings, fleet_layers = self.settings.sandbox, None
            if self.settings.files.in_store:
                from nekro.app.rounds.stored_layers import StoredLayers

                # The sweep of the fleet empties idle areas (`storage.files.expiry`).
                settings = settings.model_copy(update={"shared_idle_seconds": 0})
                fleet_layers = partial(StoredLayers, self.database, self.files, self.background)
            manager = SandboxManager(
                settings,
                self.areas,
                packages_dir=self.settings.data_dir / "layers",
                fleet_layers=fleet_layers,
                hash_seed=hash_seed(resolve_signing_key(self.settings)),
                waiting=self._waiting_sandboxes,
            )
            await manager.start()
            self._sandboxes = manager
            self.closers["sandboxes"] = manager.close
        return self._sandboxes

    async def _waiting_sandboxes(self) -> Collection[str]:
        async with self.database.read() as transaction:
            return await transaction.parked_programs.sandboxes()

    @shared_property
    def continuations(self) -> Continuations:
        """Prepares turns that go on in new chats; may raise as ``caller`` does."""
        from nekro.app.rounds.continuations import Continuations

        return Continuations(
            self.database,
            self.dispatcher.secrets,
            self.dispatcher.results,
            journal_bytes=self.settings.agent.journal_bytes,
        )

    @asynccontextmanager
    async def replayer(self) -> AsyncIterator[TurnReplayer]:
        """Return what replays turns, with sandboxes and files of its own for a block.

        Raises:
            SandboxUnavailableError: this host has no isolation that satisfies the settings.
        """
        from nekro.app.rounds.replays import open_replayer
        from nekro.app.rounds.turn_replays import TurnReplayer

        key = resolve_signing_key(self.settings)
        programs = open_replayer(
            self.settings.sandbox,
            directory=self.settings.data_dir / "replays" / new_id(),
            packages_dir=self.settings.data_dir / "layers",
            hash_seed=hash_seed(key),
        )
        async with programs as replayer:
            yield TurnReplayer(
                self.database,
                replayer,
                ProgramSecrets(key),
                self.settings,
                hash_seed=hash_seed(key),
                redact=lambda text: self.redactor(text),
                spending=lambda: self.spending,
                registry=self._fleet_registry,
            )

    async def _fleet_registry(self) -> Registry:
        """Return the methods that the fleet serves."""
        if not self.is_worker:
            await self.read_catalogue()
        return self.registry

    @shared_property
    def runs(self) -> CodeRuns:
        """Runs code that calls methods in sandboxes; may raise as ``caller`` does."""
        from nekro.app.rounds.runs import CodeRuns

        return CodeRuns(
            self.dispatcher,
            self.registry,
            self.sandboxes,
            self.spending,
            wall_seconds=self.settings.sandbox.wall_seconds,
        )

    @shared_property
    def remote_runs(self) -> RemoteRuns:
        """Sends code to rounds workers; may raise as ``caller`` does."""
        from nekro.app.rounds.runs import RemoteRuns

        return RemoteRuns(self.caller, self.catalogue, self.settings)

    async def chat(self, chat_key: str) -> ChatInfo:
        """Return a chat's row, created if it is new."""
        # Nearly every chat exists, and a read waits for no writer.
        async with self.database.read() as transaction:
            known = await find_chat(transaction.connection, chat_key)
        if known is not None:
            return known
        from nekro.app.chats.writer import ensure_chat

        async with self.database.begin() as transaction:
            return await ensure_chat(transaction, chat_key)
