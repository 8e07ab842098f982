"""The services of one process: loads, starts and closes what commands and workers use."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

from loguru import logger

from broker_config.app import create_app
from broker_config.embedded import make_data_dir, resolve_settings
from broker_config.settings import Settings
from codec.values import encode_arguments
from codec.wire import Envelope
from messaging.calls import MethodCaller
from nekro_agent import runtime
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo, IncomingMessage
from runtime.greenlet_bridge import LEAST_SECONDS, Cleanup, Closing, close_all
from storage.engine import Database
from storage.schema import require_schema
from workers.calls.records import CallRecords
from workers.parts import Parts
from workers.plugins.initialisation import start_plugins
from workers.plugins.loader import load_plugins
from workers.plugins.policies import package_policy
from workers.plugins.registry import Registry
from workers.rounds.runs import CodeReport
from workers.rounds.stop import StoppedRounds
from workers.sdk_runtime import runtime_of

__all__ = ["CodeReport", "Services"]


class Services(Parts):
    """The services of one process; call ``load``, then ``start`` on the event loop that will use them."""

    @classmethod
    def load(cls, settings: Settings, *, role: str) -> Services:
        """Load plugins and build what needs no event loop; opens no connection.

        Raises:
            SettingsError: a setting is wrong or the signing key cannot be read.
        """
        settings = resolve_settings(settings)
        make_data_dir(settings)
        loaded = load_plugins(
            settings.plugins.dirs,
            disabled=settings.plugins.disabled,
            shipped=settings.plugins.load_shipped,
            data_dir=settings.data_dir,
            packages=package_policy(settings.plugins),
        )
        lane = role if role in list(Lane) else None
        return cls(
            settings=settings,
            role=role,
            loaded=loaded,
            registry=Registry(loaded.plugins, long_methods=settings.workers.long_methods),
            database=Database(settings.database, settings.data_dir),
            app=create_app(settings, lane=lane),
        )

    async def start(self) -> None:
        """Bind the SDK's runtime and, in workers, run the plugins' init hooks.

        Also starts the listener for results of calls in a command or a rounds worker.

        Raises:
            StorageUnavailableError: the database does not answer or is not migrated.
        """
        if self.role == "cli":  # a command needs the database only where it uses it
            with contextlib.suppress(StorageError):
                await self.clocks.compare()
        else:
            await require_schema(self.database)
            await self.clocks.compare()
            self.clocks.start()
        runtime.bind(runtime_of(self))
        if self.role in (Lane.ROUNDS.value, "cli"):
            ledger = CallRecords(self.database, self.registry)
            self._caller = MethodCaller(self.app, self.settings, ledger=ledger)
            await self._caller.start()
        if self.watchdog is not None:
            self.watchdog.start()
        if self.role != "cli":
            await start_plugins(
                self.host,
                self.loaded,
                self.leases,
                owner=self.node,
                lanes=self.lanes,
                marks=self.marks,
                states=self.states,
            )
            self.states.start()
            if self.settings.plugins.reload:
                self.reloader.start()
        logger.bind(role=self.role, methods=len(self.registry)).debug("services_started")

    async def close(self) -> None:
        """Stop what ``start`` started; safe to call after a partial start."""
        await close_all(self.closings(), seconds=self.settings.workers.close_seconds)

    def closings(self) -> list[Closing]:
        """The cleanup steps, in order."""
        steps: list[tuple[str, Cleanup, float]] = [
            ("plugin states", self._stop_states, CLOSE_STEP_SECONDS),
            ("plugins", self._stop_plugins, self.host.cleanup_seconds + LEAST_SECONDS),
            ("sandboxes", self._close_sandboxes, 3 * CLOSE_STEP_SECONDS),
            ("caller", self._close_caller, CLOSE_STEP_SECONDS),
            ("remote hooks", self.remote_hooks.close, CLOSE_STEP_SECONDS),
            # On threads, because each of these blocks.
            ("background loop", partial(asyncio.to_thread, self.background.close), 3 * CLOSE_STEP_SECONDS),
            ("announcer", partial(asyncio.to_thread, self.announcer.close), CLOSE_STEP_SECONDS),
            ("publisher", partial(asyncio.to_thread, self.publisher.close), CLOSE_STEP_SECONDS),
            ("database", self.database.dispose, 3 * CLOSE_STEP_SECONDS),
            ("upload areas", partial(asyncio.to_thread, self.upload_areas.dispose), CLOSE_STEP_SECONDS),
            ("runtime", self._unbind, CLOSE_STEP_SECONDS),
        ]
        return [Closing(what=what, cleanup=cleanup, seconds=seconds) for what, cleanup, seconds in steps]

    async def _unbind(self) -> None:
        runtime.unbind()

    async def _stop_states(self) -> None:
        if self.role != "cli":
            await self.states.close()
            if self.settings.plugins.reload:
                await self.reloader.close()

    async def _stop_plugins(self) -> None:
        if self.role != "cli":
            await self.host.stop()

    async def _close_sandboxes(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
        if self._sandboxes is not None:
            await self._sandboxes.close()

    async def _close_caller(self) -> None:
        if self._caller is not None:
            await self._caller.close()

    async def chat(self, chat_key: str) -> ChatInfo:
        """Return a chat's row, created if it is new."""
        # Nearly every chat exists, and a read waits for no writer.
        async with self.database.read() as transaction:
            known = await transaction.chats.find(chat_key)
        if known is not None:
            return known
        async with self.database.begin() as transaction:
            return await transaction.chats.ensure(chat_key)

    async def invoke(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        chat_key: str,
        user_id: str | None,
        timeout_seconds: float | None,
    ) -> Envelope:
        """Call one method through the queue, as the command line does; requests no follow-up round.

        Args:
            method: function name or ``author.module.function``.
            timeout_seconds: None means the limit of the method's lane.

        Raises:
            MethodNotFoundError, MethodDisabledError, ArgumentError, MethodFailedError,
                CallTimeoutError, BrokerUnavailableError: as their names say.
        """
        entry = self.registry.find(method)
        chat = await self.chat(chat_key)
        return await self.dispatcher.invoke_once(
            entry,
            encode_arguments(args, kwargs),
            chat=chat,
            user_id=user_id,
            timeout_seconds=timeout_seconds,
        )

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
        self, line: str, *, who: CommandExecutionContext, timeout_seconds: float | None
    ) -> list[CommandResponse]:
        """Run a plugin's command on a worker, or answer the open question of one.

        Args:
            timeout_seconds: None means the limit of calls.

        Raises:
            InvalidValueError: the line is an answer, but no question is open.
            CallTimeoutError, BrokerUnavailableError, OutcomeUnknownError: as their names say.
        """
        return await self.command_desk.run(
            line,
            chat=await self.chat(who.chat_key),
            who=who,
            timeout_seconds=timeout_seconds or self.settings.workers.call_timeout_seconds,
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
        file_path: str | None = None,
    ) -> str | None:
        """Run hooks on a person's message, record it, request a round; returns its id, None if blocked.

        For the arguments see ``nekro_agent.ports.IncomingMessage``.
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
                file_path=file_path,
            )
        )

    async def reset_chat(self, chat_key: str) -> StoppedRounds:
        """Start a new conversation: stop rounds, run reset hooks, hide the history from the model."""
        return await self.intake.reset(await self.chat(chat_key))
