"""Plugins in a running system, behind one small interface.

``MemoryWorld`` runs them on ``nekro_agent.testing``. Tests use ``World`` only, so that the same assertions
also run through the real queue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import spec_blocks
from file_server import FileServer
from loaded_plugins import unload_plugins

from nekro.plugins.invoke import Outcome
from nekro.plugins.loader import LoadedPlugins, load_plugins
from nekro.plugins.registry import LoadedRegistry
from nekro_agent import layout, runtime
from nekro_agent.commands.schemas import CommandExecutionContext, CommandResponse
from nekro_agent.ports import MessageKind
from nekro_agent.runtime import DownloadPolicy, PackagePolicy
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.testing import InMemoryRuntime

__all__ = ["AUTHORED", "CHAT", "USER", "FileServer", "MemoryWorld", "StartWorld", "World", "uploads_dir"]

AUTHORED = Path(__file__).parent / "authored"
CHAT = "test-chat"
USER = "user-1"


class World(Protocol):
    """A system in which plugins run."""

    #: ``"memory"`` or ``"queue"``.
    kind: str
    data_dir: Path
    #: The plugins as loaded in this process.
    loaded: LoadedPlugins
    registry: LoadedRegistry

    async def call(
        self, name: str, /, *args: Any, chat_key: str = CHAT, user_id: str | None = USER, **kwargs: Any
    ) -> Outcome:
        """Call a method by any of its names as sandboxed code would; the effects of its type happen."""
        ...

    async def stored(
        self, plugin_key: str, store_key: str, *, chat_key: str = "", user_key: str = ""
    ) -> str | None:
        """Value in ``plugin.store``."""
        ...

    async def store(
        self, plugin_key: str, store_key: str, value: str, *, chat_key: str = "", user_key: str = ""
    ) -> None:
        """Write a value of ``plugin.store`` from outside."""
        ...

    async def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        """Texts of the chat's recorded messages of one kind, in order."""
        ...

    async def shared_dir(self, chat_key: str = CHAT) -> Path:
        """Host directory behind the chat's ``/app/shared``; it exists."""
        ...

    def uploads_dir(self, chat_key: str = CHAT) -> Path:
        """Host directory behind the chat's ``/app/uploads``; it exists."""
        ...

    async def woken(self, chat_key: str) -> int:
        """Number of requested follow-up rounds."""
        ...

    async def command(self, line: str, who: CommandExecutionContext) -> list[CommandResponse]:
        """Run a command line."""
        ...

    async def reset(self, chat_key: str) -> None:
        """Reset the chat."""
        ...

    async def stop(self) -> None:
        """Stop the workers; the plugins' cleanup hooks run."""
        ...


class MemoryWorld:
    """``World`` in memory."""

    kind = "memory"

    def __init__(self, loaded: LoadedPlugins, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.loaded = loaded
        self.registry = LoadedRegistry(loaded.plugins)
        self.runtime = InMemoryRuntime(
            *loaded.plugins,
            data_dir=data_dir,
            downloads=DownloadPolicy(allow_private=("127.0.0.0/8",)),
            packages=PackagePolicy(allow=()),
        )

    async def call(
        self, name: str, /, *args: Any, chat_key: str = CHAT, user_id: str | None = USER, **kwargs: Any
    ) -> Outcome:
        task = self.registry.find(name).task
        return await self.runtime.call(task, *args, chat_key=chat_key, user_id=user_id, **kwargs)

    async def stored(
        self, plugin_key: str, store_key: str, *, chat_key: str = "", user_key: str = ""
    ) -> str | None:
        return await self.runtime.store.get(
            plugin_key, chat_key=chat_key, user_key=user_key, store_key=store_key
        )

    async def store(
        self, plugin_key: str, store_key: str, value: str, *, chat_key: str = "", user_key: str = ""
    ) -> None:
        await self.runtime.store.set(
            plugin_key, chat_key=chat_key, user_key=user_key, store_key=store_key, value=value
        )

    async def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        return self.runtime.messages.texts(chat_key, kind)

    async def shared_dir(self, chat_key: str = CHAT) -> Path:
        return self.runtime.areas.shared_dir(layout.default_container_key(chat_key))

    def uploads_dir(self, chat_key: str = CHAT) -> Path:
        return self.runtime.areas.uploads_dir(chat_key)

    async def woken(self, chat_key: str) -> int:
        return self.runtime.messages.triggered.count(chat_key)

    async def command(self, line: str, who: CommandExecutionContext) -> list[CommandResponse]:
        return [response async for response in self.runtime.command(line, who)]

    async def reset(self, chat_key: str) -> None:
        await self.runtime.host.channel_reset(AgentCtx.for_call(chat_key=chat_key))

    async def stop(self) -> None:
        await self.runtime.host.stop()


StartWorld = Callable[[Path], Awaitable[MemoryWorld]]


@pytest.fixture
async def start_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_server: FileServer
) -> AsyncIterator[StartWorld]:
    """Start a world with the plugins of a folder; import-time code gets its data directory."""
    monkeypatch.setenv("NEKRO_DATA_DIR", str(tmp_path / "data"))
    runtime.prepare(data_dir=None)  # another test may have fixed the data directory of this process
    async with AsyncExitStack() as stack:

        async def start(plugins: Path) -> MemoryWorld:
            loaded = load_plugins([plugins], shipped=False, entry_points=False)
            world = MemoryWorld(loaded, tmp_path / "data")
            stack.callback(unload_plugins, loaded)
            await stack.enter_async_context(world.runtime)
            return world

        yield start


@pytest.fixture(scope="session")
def spec_plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins of the specification documents, as files."""
    if not spec_blocks.SPEC_DIR.is_dir():
        pytest.skip(f"the specification documents are not at {spec_blocks.SPEC_DIR}")
    directory = tmp_path_factory.mktemp("spec_plugins")
    spec_blocks.write_plugins(directory)
    return directory


@pytest.fixture
async def authored(start_world: StartWorld) -> MemoryWorld:
    """The plugins in ``authored/``."""
    return await start_world(AUTHORED)


def uploads_dir(world: World, chat_key: str = CHAT) -> Path:
    """Host directory behind ``/app/uploads`` of a chat."""
    return world.uploads_dir(chat_key)
