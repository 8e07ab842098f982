"""A bound runtime with the services of a worker on a database of its own."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from broker_config.settings import StoreSettings
from nekro.app.chats.writer import TimerFirings
from nekro.plugins.commands import CommandTable
from nekro.plugins.hooks import HookFailure, PluginHost
from nekro.plugins.invoke import Outcome, call_method
from nekro_agent import layout, runtime
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.errors import MethodNotFoundError
from nekro_agent.execution.current import effects_of
from nekro_agent.plugin import NekroPlugin, using
from nekro_agent.runtime import CoreConfig, DownloadPolicy, PackagePolicy, Runtime, StorePolicy, UploadPolicy
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing.services import (
    InMemoryJobs,
    RecordedTriggers,
    WorldMessages,
    WorldTimers,
    new_database,
)
from storage.files.areas import DataAreas
from storage.kv import SqlKeyValueStore
from storage.timer_services import SqlCronJobs
from workers.sdk_runtime import SqlRecords

__all__ = ["InMemoryRuntime"]


class InMemoryRuntime:
    """A runtime that is bound in an ``async with`` block, which also runs the plugins' init and cleanup."""

    def __init__(
        self,
        *plugins: NekroPlugin,
        data_dir: Path | None = None,
        store_policy: StorePolicy | None = None,
        downloads: DownloadPolicy | None = None,
        packages: PackagePolicy | None = None,
        uploads: UploadPolicy | None = None,
        core: CoreConfig | None = None,
    ) -> None:
        """Create a world that runs ``plugins``.

        Args:
            data_dir: None creates a temporary directory that is removed at the end.
        """
        self._cleanup = ExitStack()
        self._call_numbers = itertools.count()
        own = Path(tempfile.mkdtemp(prefix="nekro-"))
        # Also if the block is never entered.
        self._cleanup.callback(weakref.finalize(self, shutil.rmtree, own, ignore_errors=True))
        root = data_dir or own / "data"
        if data_dir is None:
            root.mkdir()
        store_policy = store_policy or StorePolicy()
        triggers = RecordedTriggers()
        firings = TimerFirings(triggers)
        self.plugins = list(plugins)
        self._database = new_database(own)
        self.store = SqlKeyValueStore(
            self._database, StoreSettings(max_value_bytes=store_policy.max_value_bytes)
        )
        self.records = SqlRecords(self._database, triggers)
        self.messages = WorldMessages(self._database, self.records, triggers)
        self.areas = DataAreas(root)
        self.timers = WorldTimers(self._database, firings)
        self.cron_jobs = SqlCronJobs(self._database, on_fire=firings.fire)
        self.jobs = InMemoryJobs(self.plugins)
        self.commands = CommandTable(self.plugins)
        #: Init hooks that failed.
        self.failures: list[HookFailure] = []
        self.host = PluginHost(self.plugins)
        self.runtime = Runtime(
            data_dir=root,
            store=self.store,
            messages=self.messages,
            areas=self.areas,
            timers=self.timers,
            cron_jobs=self.cron_jobs,
            jobs=self.jobs,
            records=self.records,
            intake=self.messages,
            hooks=self.host,
            store_policy=store_policy,
            downloads=downloads or DownloadPolicy(),
            packages=packages or PackagePolicy(),
            uploads=uploads or UploadPolicy(),
            core=core or CoreConfig(),
        )

    async def __aenter__(self) -> Self:
        # Callbacks run in reverse order: this one runs after the previous runtime is bound again.
        self._cleanup.callback(self._refresh_configs)
        self._cleanup.enter_context(runtime.bound(self.runtime))
        self._refresh_configs()
        self.failures = await self.host.start()
        self.commands.refresh(self.plugins)  # inits may have registered some
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.jobs.close()
            await self.host.stop()
        finally:
            await self._database.dispose()
            self._cleanup.close()

    def context(
        self,
        *,
        chat_key: str = "test-chat",
        user_id: str | None = "test-user",
        plugin_key: str | None = None,
        call_id: str | None = None,
    ) -> AgentCtx:
        """Return a context like that of a call of sandboxed code.

        Adapter and channel are those of the chat key; the adapter is ``test`` where it names none.

        Args:
            call_id: None: a new one.
        """
        channel = layout.channel_of(chat_key)
        return AgentCtx.for_call(
            chat_key=chat_key,
            user_id=user_id,
            adapter_key=channel.adapter_key or "test",
            channel_id=channel.channel_id or chat_key,
            channel_type=channel.channel_type or "private",
            plugin_key=plugin_key,
            call_id=call_id or f"call-{next(self._call_numbers)}",
        )

    async def call(
        self,
        method_name: str,
        /,
        *args: Any,
        chat_key: str = "test-chat",
        user_id: str | None = "test-user",
        call_id: str | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Run a method by its function name, as sandboxed code would, with the effects of its type.

        Args:
            call_id: an id that was used before repeats that call, as after the death of its worker: messages
                that it has sent are not sent again. None: a new call.

        Raises:
            MethodNotFoundError: none of the plugins has it.
            ArgumentError: the arguments do not match the signature.
        """
        for plugin in self.plugins:
            for method in plugin.sandbox_methods:
                if method_name in (method.func.__name__, f"{plugin.key}.{method.func.__name__}"):
                    plugin.refresh_config()
                    ctx = self.context(
                        chat_key=chat_key, user_id=user_id, plugin_key=plugin.key, call_id=call_id
                    )
                    with using(plugin), effects_of(str(ctx.call_id)):
                        outcome = await call_method(method, ctx, args, kwargs)
                    await self._record(outcome, ctx)
                    return outcome
        raise MethodNotFoundError(f"none of the plugins has a method {method_name!r}")

    async def command(
        self, line: str, context: CommandExecutionContext | None = None
    ) -> AsyncIterator[CommandResponse]:
        """Run ``/name arguments`` and yield the responses."""
        who = context or CommandExecutionContext(
            user_id="test-user", chat_key="test-chat", is_super_user=True, is_advanced_user=True
        )
        async for response in self.commands.run(line, who):
            yield response

    def _refresh_configs(self) -> None:
        """Update configurations that plugins read during their import to the current data root."""
        for plugin in self.plugins:
            if plugin.config_file is not None:
                plugin.config_file.refreshed()

    async def _record(self, outcome: Outcome, ctx: AgentCtx) -> None:
        text, wakes = outcome.text, outcome.type.wakes_agent
        if text is not None and not await self.host.on_system_message(ctx.chat_key, text):
            await self.messages.push_system(ctx.chat_key, text, trigger_agent=wakes, call_id=ctx.call_id)
        elif wakes:
            # Nothing to record (a text that a hook dropped, or content parts), but the agent continues.
            await self.messages.wake(ctx.chat_key)
