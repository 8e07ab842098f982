"""The services of one process: loads, starts and closes what commands and workers use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger

from broker_config.embedded import make_data_dir, resolve_settings
from broker_config.settings import Settings
from nekro.app.calls.dispatch import CallScope
from nekro.app.calls.records import CallRecords
from nekro.app.catalogue import FleetCatalogue
from nekro.app.chats.attachments import segments_of_message
from nekro.app.parts import CALLER, GATEWAY, Parts
from nekro.base.greenlet_bridge import LEAST_SECONDS, Cleanup, Closing, close_all
from nekro.broker.calls import MethodCaller
from nekro.plugins.entry_registry import Registry, refuse_unfit
from nekro.wire.invocation import Envelope, new_id
from nekro.wire.values import encode_arguments
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo, IncomingMessage
from storage.caller_reads import find_chat
from storage.database_clock import follow_database_clock
from storage.engine import Database

if TYPE_CHECKING:
    from nekro.app.chats.attachments import Attachment
    from nekro.app.chats.files import ChatFiles
    from nekro.app.rounds.runs import CodeReport
    from nekro.app.rounds.stop import StoppedRounds
    from nekro.plugins.entries import MethodEntry, PluginEntry
    from nekro.plugins.loader import PreparedPlugins
    from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
    from nekro_agent.schemas.agent_ctx import AgentCtx
    from storage.accounts.approvals import Approval

__all__ = ["CALLER", "GATEWAY", "Services"]


class Services(Parts):
    """The services of one process; call ``load``, then ``start`` on the event loop that will use them."""

    #: What the fleet served at the last reading; None in workers.
    _fleet: FleetCatalogue | None = None
    _read_at: float = 0.0

    @classmethod
    def load(
        cls,
        settings: Settings,
        *,
        role: str,
        on_progress: Callable[[str], None] = lambda _: None,
        prepared: PreparedPlugins | None = None,
    ) -> Services:
        """Build what needs no event loop; opens no connection. A worker imports its plugins here.

        Args:
            role: the lane of a worker, ``CALLER`` or ``GATEWAY``.
            on_progress: called by a worker with what it does next, until ``start`` has ended.
            prepared: the plugins that a worker has when it is forked.

        Raises:
            SettingsError: a setting is wrong or the signing key cannot be read.
        """
        settings = resolve_settings(settings)
        make_data_dir(settings)
        database = Database(settings.database, settings.data_dir)
        if role in (CALLER, GATEWAY):
            services = cls(settings=settings, role=role, registry=Registry(), database=database)
            services.registry = Registry(collect=services._collected)
            return services
        from nekro.plugins.configuration import core_config, package_policy
        from nekro.plugins.loader import load_plugins
        from nekro.plugins.registry import LoadedRegistry

        loaded = load_plugins(
            settings.plugins.dirs,
            disabled=settings.plugins.disabled,
            shipped=settings.plugins.load_shipped,
            data_dir=settings.data_dir,
            packages=package_policy(settings.plugins),
            core=core_config(settings),
            patience_seconds=settings.plugins.start_seconds,
            on_progress=on_progress,
            prepared=prepared,
        )
        return cls(
            settings=settings,
            role=role,
            registry=LoadedRegistry(
                loaded.plugins, long_methods=settings.workers.long_methods, approval=settings.approval
            ),
            database=database,
            _loaded=loaded,
            on_progress=on_progress,
        )

    async def start(self) -> None:
        """Start what this process's role needs.

        A worker binds the SDK's runtime, runs the plugins' init hooks and publishes what it serves; a caller
        reads what the fleet serves. Callers and rounds workers listen for results of calls.

        Raises:
            StorageUnavailableError: the database does not answer or is not migrated.
        """
        if self.is_worker:
            await self._start_worker()
        else:
            await self._start_caller()
        logger.bind(role=self.role, methods=len(self.registry)).debug("services_started")

    async def _start_caller(self) -> None:
        try:
            if not self.database.is_sqlite:  # SQLite uses the clock of this host
                await follow_database_clock(self.database)
            await self.read_catalogue()
        except StorageError:
            from storage.migrate import require_schema

            await require_schema(self.database)  # says what is wrong if the database is not migrated
            raise
        await self._start_calling()

    async def _collected(
        self, plugin: PluginEntry, own: list[MethodEntry], ctx: AgentCtx
    ) -> list[MethodEntry]:
        """Let a worker run the hook that selects the methods of a chat's code."""
        return await self.fleet_hooks.collected(plugin, own, ctx)

    async def _start_worker(self) -> None:
        from nekro_agent import runtime
        from storage.migrate import require_schema
        from workers.plugins.initialisation import start_plugins
        from workers.sdk_runtime import runtime_of

        self.on_progress("connecting to the database")
        await require_schema(self.database)
        await self.clocks.compare()
        self.clocks.start()
        runtime.bind(runtime_of(self))
        await self.mcp.read()
        if self.role == Lane.ROUNDS.value:
            await self._start_calling()
        if self.watchdog is not None:
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
        self.mcp.start()
        self.reloader.start(watches=self.settings.plugins.reload)
        await self.plugin_hosts.start()
        await self.publisher_of_catalogue.start()

    async def _start_calling(self) -> None:
        ledger = CallRecords(self.database, self.registry)
        self._caller = MethodCaller(lambda: self.app, self.settings, ledger=ledger)
        await self._caller.start()

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
            self.declare_pinned_plugins(self.lanes)
        return catalogue

    async def refresh(self) -> None:
        """Read the lane overrides, and in callers the catalogue, if they were not read within a second."""
        await super().refresh()
        is_fresh = time.monotonic() - self._read_at < FRESH_SECONDS
        if self.is_worker or (is_fresh and self._fleet is not None and self._fleet.is_live):
            return
        try:
            await self.read_catalogue()
        except StorageError as exc:  # what was read before stays in use
            logger.bind(error=str(exc)).warning("catalogue_not_read")

    async def close(self) -> None:
        """Stop what ``start`` started; safe to call after a partial start."""
        await close_all(self.closings(), seconds=self.settings.workers.close_seconds)

    def closings(self) -> list[Closing]:
        """The cleanup steps, in order."""
        steps: list[tuple[str, Cleanup, float]] = [
            ("catalogue", self._leave_catalogue, CLOSE_STEP_SECONDS),
            ("plugin routes", self._stop_routes, 2 * CLOSE_STEP_SECONDS),
            ("plugin states", self._stop_states, CLOSE_STEP_SECONDS),
            ("plugins", self._stop_plugins, self.settings.workers.cleanup_seconds + LEAST_SECONDS),
            ("summaries", self._close_summaries, CLOSE_STEP_SECONDS),
            ("sandboxes", self._close_sandboxes, 3 * CLOSE_STEP_SECONDS),
            ("caller", self._close_caller, CLOSE_STEP_SECONDS),
            ("remote hooks", self._close_remote_hooks, CLOSE_STEP_SECONDS),
            # On threads, because each of these blocks.
            ("background loop", self._closing("background"), 3 * CLOSE_STEP_SECONDS),
            ("announcer", self._closing("announcer"), CLOSE_STEP_SECONDS),
            ("publisher", self._closing("publisher"), CLOSE_STEP_SECONDS),
            ("app", self._closing("app"), CLOSE_STEP_SECONDS),
            ("database", self.database.dispose, 3 * CLOSE_STEP_SECONDS),
            ("upload areas", self._closing("upload_areas", "dispose"), CLOSE_STEP_SECONDS),
            ("runtime", self._unbind, CLOSE_STEP_SECONDS),
        ]
        return [Closing(what=what, cleanup=cleanup, seconds=seconds) for what, cleanup, seconds in steps]

    def _closing(self, part: str, method: str = "close") -> Cleanup:
        """Return the cleanup of a part that blocks; nothing is done for one that was never built."""

        async def close() -> None:
            built = self.__dict__.get(part)
            if built is not None:
                await asyncio.to_thread(getattr(built, method))

        return close

    async def _unbind(self) -> None:
        if self.is_worker:
            from nekro_agent import runtime

            runtime.unbind()

    async def _leave_catalogue(self) -> None:
        if "publisher_of_catalogue" in self.__dict__:
            await self.publisher_of_catalogue.close()

    async def _stop_routes(self) -> None:
        if "plugin_hosts" in self.__dict__:
            await self.plugin_hosts.close()

    async def _close_remote_hooks(self) -> None:
        if "remote_hooks" in self.__dict__:
            await self.remote_hooks.close()

    async def _stop_states(self) -> None:
        if self.is_worker:
            await self.states.close()
            await self.mcp.close()
            await self.reloader.close()

    async def _stop_plugins(self) -> None:
        if self.is_worker:
            await self.host.stop()

    async def _close_summaries(self) -> None:
        if "summaries" in self.__dict__:
            await self.summaries.close()

    async def _close_sandboxes(self) -> None:
        if self.is_worker and self.watchdog is not None:
            self.watchdog.stop()
        if self._sandboxes is not None:
            await self._sandboxes.close()

    async def _close_caller(self) -> None:
        if self._caller is not None:
            await self._caller.close()

    async def find_method(self, name: str) -> MethodEntry:
        """Return the method of a full name, function name or alias, as the fleet serves it now.

        Raises:
            MethodNotFoundError, MethodDisabledError: as from ``Registry.find``.
        """
        await self.refresh()
        if name not in self.registry and not self.is_worker:
            await self.read_catalogue()  # a worker may have published it within the last second
        return self.registry.find(name)

    def files_of(self, chat: ChatInfo) -> ChatFiles:
        """Return the files of a chat; its methods block."""
        from nekro.app.chats.files import ChatFiles

        return ChatFiles(self.settings, self.areas, chat)

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

    async def invoke(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        chat_key: str,
        user_id: str | None,
        timeout_seconds: float | None,
        call_id: str | None = None,
        approver: str | None = None,
    ) -> Envelope:
        """Call one method through the queue, as the command line does; requests no follow-up round.

        Args:
            method: function name or ``author.module.function``.
            call_id: a call other than of type TOOL has at most one effect per id; None makes a new one.
            timeout_seconds: None means the limit of the method's lane.
            approver: who approves the call by making it, if it requires approval, such as ``shell:ada``.
                None: not approved; ``ask_approval`` lets such a call wait.

        Raises:
            MethodNotFoundError, MethodDisabledError, ArgumentError, MethodFailedError, NotApprovedError,
                CallTimeoutError, BrokerUnavailableError: as their names say.
        """
        entry = await self.find_method(method)
        refuse_unfit(entry, len(args), kwargs)
        chat = await self.chat(chat_key)
        return await self.dispatcher.invoke_once(
            entry,
            encode_arguments(args, kwargs),
            chat=chat,
            user_id=user_id,
            timeout_seconds=timeout_seconds,
            call_id=call_id,
            approver=approver,
        )

    async def ask_approval(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        chat_key: str,
        user_id: str | None,
        call_id: str | None = None,
    ) -> Approval:
        """Request approval of one call; if it is approved it runs, and its result goes to the chat.

        Args:
            method: function name or ``author.module.function``.
            call_id: of a call with this id approval is requested once; None makes a new one.

        Raises:
            MethodNotFoundError, MethodDisabledError, ArgumentError, StorageUnavailableError,
                OutcomeUnknownError: as their names say.
        """
        entry = await self.find_method(method)
        refuse_unfit(entry, len(args), kwargs)
        chat = await self.chat(chat_key)
        call_id = call_id or new_id()
        scope = CallScope(chat=chat, user_id=user_id, wakes_agent=False, account_id=call_id)
        arguments, lane = encode_arguments(args, kwargs), self.dispatcher.lane_of(entry)
        invocation = self.dispatcher.awaiting(entry, arguments, scope, call_id=call_id, lane=lane)
        return await self.approval_requests.ask(entry, invocation, lane=lane)

    async def run_code(
        self, code: str, *, chat_key: str, user_id: str | None, follow_up: bool, file_name: str
    ) -> CodeReport:
        """Run code in a sandbox, like code of the model.

        Args:
            follow_up: whether an AGENT result requests a round.
            file_name: name of the code's file, for the log.

        Raises:
            SandboxUnavailableError, SandboxError: the code did not run.
        """
        chat = await self.chat(chat_key)
        logger.bind(chat_key=chat_key, file=file_name).debug("code_run")
        return await self.runs.run(code, chat=chat, user_id=user_id, wakes_agent=follow_up)

    async def run_command(
        self,
        line: str,
        *,
        who: CommandExecutionContext,
        timeout_seconds: float | None,
        call_id: str | None = None,
    ) -> list[CommandResponse]:
        """Run a plugin's command on a worker, or answer the open question of one.

        Args:
            timeout_seconds: None means the limit of calls.
            call_id: as of ``CommandSender.run``.

        Raises:
            InvalidValueError: the line is an answer, but no question is open.
            CallTimeoutError, BrokerUnavailableError, OutcomeUnknownError: as their names say.
        """
        return await self.command_sender.run(
            line,
            chat=await self.chat(who.chat_key),
            who=who,
            timeout_seconds=timeout_seconds or self.settings.workers.call_timeout_seconds,
            call_id=call_id,
        )

    async def receive_message(
        self,
        chat_key: str,
        text: str,
        *,
        user_id: str,
        user_name: str,
        is_tome: bool = True,
        adapter_key: str | None = None,
        channel_id: str | None = None,
        channel_type: str | None = None,
        channel_name: str | None = None,
        files: Sequence[Attachment] = (),
    ) -> str | None:
        """Run hooks on a person's message, record it, request a round; returns its id, None if blocked.

        For the arguments see ``nekro_agent.ports.IncomingMessage``.

        Args:
            files: pictures and files of the message, which ``files_of(chat).add`` has stored.
        """
        return await self.intake.receive(
            IncomingMessage(
                chat_key=chat_key,
                text=text,
                user_id=user_id,
                user_name=user_name,
                is_tome=is_tome,
                adapter_key=adapter_key,
                channel_id=channel_id,
                channel_type=channel_type,
                channel_name=channel_name,
                content_data=segments_of_message(text, files),
            )
        )

    async def plugin_config(self, plugin_key: str, changes: Mapping[str, Any] | None = None) -> object:
        """Read or change a plugin's configuration on a worker; see ``FleetHooks.config``."""
        return await self.fleet_hooks.config(plugin_key, changes)

    async def try_mcp_server(self, plugin_key: str) -> dict[str, Any]:
        """Connect with an MCP server on a worker, as it is declared now; see
        ``nekro.extensions.mcp.follower``."""
        from nekro.extensions.mcp.follower import untried

        if (answer := await untried(self.settings, self.database, plugin_key)) is not None:
            return answer
        # The start and the listing, each with its limit.
        seconds = 2 * self.settings.plugins.start_seconds + CLOSE_STEP_SECONDS
        return await self.fleet_hooks.try_mcp_server(plugin_key, seconds=seconds)

    async def reset_chat(self, chat_key: str) -> StoppedRounds:
        """Start a new conversation: stop rounds, run reset hooks, hide the history from the model."""
        return await self.intake.reset(await self.chat(chat_key))
