"""Everything a plugin needs, in memory: for plugin authors' tests.

    async def test_greeting(tmp_path):
        async with InMemoryRuntime(plugin, data_dir=tmp_path) as world:
            outcome = await world.call("greet", "Ada", user_id="u1")
            assert outcome.value == "Hello Ada"
            assert world.messages.sent[0].text == "…"

The same contract tests run on these services and on the real ones.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nekro_agent import layout, runtime
from nekro_agent.errors import MethodNotFoundError
from nekro_agent.hooks import PluginHost
from nekro_agent.invoke import Outcome, call_method
from nekro_agent.plugin import NekroPlugin
from nekro_agent.policies import DownloadPolicy, PackagePolicy, StorePolicy
from nekro_agent.ports import MessageKind, OutgoingMessage
from nekro_agent.runtime import Runtime
from nekro_agent.schemas.agent_ctx import AgentCtx

__all__ = ["InMemoryMessages", "InMemoryRuntime", "InMemoryStore", "LocalAreas", "RecordedMessage"]


class InMemoryStore:
    """``KeyValueStore`` in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str, str], str] = {}

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None."""
        return self.values.get((plugin_key, chat_key, user_key, store_key))

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store; True when the key is new."""
        key = (plugin_key, chat_key, user_key, store_key)
        new = key not in self.values
        self.values[key] = value
        return new

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """Delete; True when there was a value."""
        return self.values.pop((plugin_key, chat_key, user_key, store_key), None) is not None

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin."""
        keys = [key for key in self.values if key[0] == plugin_key]
        for key in keys:
            del self.values[key]
        return len(keys)


class LocalAreas:
    """``FileAreas`` below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def uploads_dir(self, chat_key: str) -> Path:
        """Directory behind ``/app/uploads``."""
        return _made(layout.uploads_dir(self._root, chat_key))

    def shared_dir(self, container_key: str) -> Path:
        """Directory behind ``/app/shared``."""
        return _made(layout.shared_dir(self._root, container_key))

    def plugin_dir(self, plugin_key: str) -> Path:
        """Directory of a plugin."""
        return _made(layout.plugin_dir(self._root, plugin_key))


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@dataclass(frozen=True, kw_only=True)
class RecordedMessage:
    """One message of a chat's history."""

    id: str
    chat_key: str
    kind: MessageKind
    text: str
    file_path: str | None = None
    file_name: str | None = None


@dataclass(kw_only=True)
class InMemoryMessages:
    """``Messages`` in lists."""

    #: What plugins sent, in order.
    sent: list[OutgoingMessage] = field(default_factory=list)
    #: Every recorded message of every chat, in order.
    history: list[RecordedMessage] = field(default_factory=list)
    #: Chats whose agent was woken, in order.
    triggered: list[str] = field(default_factory=list)

    async def send(self, message: OutgoingMessage) -> str:
        """Keep a message of the agent."""
        self.sent.append(message)
        if not message.record:
            return f"m{len(self.sent)}-unrecorded"
        return self._add(
            message.chat_key, MessageKind.ASSISTANT, message.text, message.file_path, message.file_name
        )

    async def push_system(self, chat_key: str, text: str, *, trigger_agent: bool, call_id: str | None) -> str:
        """Keep a system message."""
        if trigger_agent:
            self.triggered.append(chat_key)
        return self._add(chat_key, MessageKind.SYSTEM, text)

    def system_texts(self, chat_key: str) -> list[str]:
        """Texts of the system messages of a chat."""
        return [
            message.text
            for message in self.history
            if message.chat_key == chat_key and message.kind is MessageKind.SYSTEM
        ]

    def _add(
        self,
        chat_key: str,
        kind: MessageKind,
        text: str,
        file_path: str | None = None,
        file_name: str | None = None,
    ) -> str:
        message = RecordedMessage(
            id=f"m{len(self.history) + 1}",
            chat_key=chat_key,
            kind=kind,
            text=text,
            file_path=file_path,
            file_name=file_name,
        )
        self.history.append(message)
        return message.id


class InMemoryRuntime:
    """A runtime, bound for the duration of an ``async with`` block, with the plugins' init and cleanup."""

    def __init__(
        self,
        *plugins: NekroPlugin,
        data_dir: Path | None = None,
        store_policy: StorePolicy | None = None,
        downloads: DownloadPolicy | None = None,
        packages: PackagePolicy | None = None,
    ) -> None:
        """Take the plugins to run.

        Args:
            data_dir: None makes a temporary directory that is removed at the end.
        """
        self._cleanup = ExitStack()
        root = data_dir or Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nekro-")))
        self.plugins = list(plugins)
        self.store = InMemoryStore()
        self.messages = InMemoryMessages()
        self.areas = LocalAreas(root)
        self.host = PluginHost(self.plugins)
        self.runtime = Runtime(
            data_dir=root,
            store=self.store,
            messages=self.messages,
            areas=self.areas,
            hooks=self.host,
            store_policy=store_policy or StorePolicy(),
            downloads=downloads or DownloadPolicy(),
            packages=packages or PackagePolicy(),
        )

    async def __aenter__(self) -> Self:
        self._cleanup.enter_context(runtime.bound(self.runtime))
        await self.host.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.host.stop()
        finally:
            self._cleanup.close()

    def context(
        self, *, chat_key: str = "test-chat", user_id: str | None = "test-user", plugin_key: str | None = None
    ) -> AgentCtx:
        """Return a context as a call of sandboxed code would have it."""
        return AgentCtx.for_call(
            chat_key=chat_key,
            user_id=user_id,
            adapter_key="test",
            channel_id=chat_key,
            channel_type="private",
            plugin_key=plugin_key,
            call_id=f"call-{len(self.messages.history)}",
        )

    async def call(
        self,
        method_name: str,
        /,
        *args: Any,
        chat_key: str = "test-chat",
        user_id: str | None = "test-user",
        **kwargs: Any,
    ) -> Outcome:
        """Run a method by its function name, as sandboxed code would, with the effects of its type.

        Raises:
            MethodNotFoundError: none of the plugins has it.
            ArgumentError: the arguments do not fit.
        """
        for plugin in self.plugins:
            for method in plugin.sandbox_methods:
                if method_name in (method.func.__name__, f"{plugin.key}.{method.func.__name__}"):
                    ctx = self.context(chat_key=chat_key, user_id=user_id, plugin_key=plugin.key)
                    outcome = await call_method(method, ctx, args, kwargs)
                    await self._record(outcome, ctx)
                    return outcome
        raise MethodNotFoundError(f"none of the plugins has a method {method_name!r}")

    async def _record(self, outcome: Outcome, ctx: AgentCtx) -> None:
        if outcome.text is not None:
            await self.messages.push_system(
                ctx.chat_key, outcome.text, trigger_agent=outcome.type.wakes_agent, call_id=ctx.call_id
            )
        elif outcome.segments is not None:
            self.messages.triggered.append(ctx.chat_key)
