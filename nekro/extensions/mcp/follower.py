"""Keeps the plugins of MCP servers as they are declared and were listed last, while the worker runs.

Every worker builds the same plugins from rows and ``mcp.json``. The owner of a stdio server's plugin keeps
its process, and records the tools that it lists. Servers with a URL are listed by one worker at a time. A
worker also tries a server for ``nekro mcp test``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from broker_config.secret_files import secret_paths
from broker_config.settings import Settings
from nekro.base.tasks import OwnedTasks, log_errors, repeat
from nekro.extensions.mcp.client.hub import SDK_MISSING, Listings, ServerHub, has_sdk
from nekro.extensions.mcp.client.plugins import build_plugin, needs_approval
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.server_requests import ServerRequests
from nekro.extensions.mcp.servers import (
    McpServer,
    file_path,
    merged,
    read_file,
    read_servers,
    redactor_of,
    unused_reason,
)
from nekro.plugins.hooks import PluginHost
from nekro.plugins.importing import Imported
from nekro.plugins.loader import LoadedPlugins
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS, POLL_SECONDS
from nekro_agent.errors import InvalidValueError, MethodNotFoundError, NekroError, SandboxUnavailableError
from nekro_agent.methods import Lane, describe_signature
from nekro_agent.plugin import NekroPlugin, is_in_use
from storage.engine import Database
from workers.extensions import ServicesOfWorker, WorkerPart

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "McpPart",
    "McpServers",
    "try_on_worker",
    "try_server",
]


#: Under this name other processes ask a worker to try a server.
_HOOK: Final = "nekro_mcp"
#: How long an attempt to list a server counts as running, in units of the time limit of a start.
_ATTEMPTS: Final = 2


class McpServers:
    """The MCP servers of one worker process."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        loaded: LoadedPlugins,
        host: PluginHost,
        *,
        serves: bool,
        may_run_here: Callable[[str], bool],
        is_wanted: Callable[[NekroPlugin], Awaitable[bool]],
        on_change: Callable[[], None],
    ) -> None:
        """Create it; ``read`` adds the plugins, ``start`` follows changes.

        Args:
            serves: whether this process runs methods, so that it may list servers with a URL.
            may_run_here: whether this process may run the plugin of a key: its owner if it is pinned.
            is_wanted: whether a plugin is to be enabled.
            on_change: called after plugins were added, replaced or removed.
        """
        self._settings, self._database = settings, database
        self._loaded, self._host = loaded, host
        self._serves, self._may_run_here = serves, may_run_here
        self._is_wanted, self._on_change = is_wanted, on_change
        self.hub = ServerHub(settings, Listings(database), ServerRequests(settings, database))
        #: What was built, by the name of the server.
        self._built: dict[str, tuple[object, Imported]] = {}
        self._seen: object = None
        self._tasks = OwnedTasks("nekro-mcp")
        #: The loop that follows changes; plugins are replaced on it only.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = asyncio.Lock()
        #: Servers that this process is listing.
        self._listing: set[str] = set()

    async def read(self) -> None:
        """Add the plugins of the servers, before plugins are started.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        await self._look(starts=False)

    async def refresh(self) -> None:
        """Read what is declared now.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        own = asyncio.get_running_loop()
        if self._loop is None or self._loop is own:
            await self._look(starts=True)
        else:  # a call on another loop of this process
            looking = asyncio.run_coroutine_threadsafe(self._look(starts=True), self._loop)
            await asyncio.wrap_future(looking)

    def start(self) -> None:
        """Follow declarations and listings from now on, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks.begin(repeat(self._follow, seconds=FRESH_SECONDS, on_error="mcp_servers_not_read"))

    async def close(self) -> None:
        """Stop following."""
        await self._tasks.close()

    def server_of(self, plugin_key: str) -> McpServer | None:
        """Return the server of a plugin; None if it is none of a server."""
        return next((server for server in self._servers if server.plugin_key == plugin_key), None)

    def may_use(self, server: McpServer) -> bool:
        """Whether this process may connect with a server: one with a command has a single owner."""
        declaration = server.declaration
        return declaration is None or not declaration.is_stdio or self._may_run_here(server.plugin_key)

    # -- following ------------------------------------------------------------------------------

    _servers: tuple[McpServer, ...] = ()

    async def _follow(self) -> None:
        await self._look(starts=True)
        await self._list_what_is_due()

    async def _look(self, *, starts: bool) -> None:
        async with self._looking:
            await self._read(starts=starts)

    async def _read(self, *, starts: bool) -> None:
        path = file_path(self._settings)
        async with self._database.read() as transaction:
            stored = ServerRows(transaction.connection)
            seen = (await stored.revisions(), await asyncio.to_thread(_stamp, path))
            if seen == self._seen:
                return
            rows = await stored.all()
        fault = None
        try:
            entries = await asyncio.to_thread(read_file, path)
        except InvalidValueError as exc:
            entries, fault = {}, str(exc)
        servers = merged(entries, rows, secrets=secret_paths(self._settings))
        await self._apply(servers, _broken_file(path, fault), starts=starts)
        self._seen = seen

    async def _apply(self, servers: list[McpServer], fault: Imported | None, *, starts: bool) -> None:
        wanted = {server.name: server for server in servers if server.is_enabled}
        made = {
            name: self._imported(server)
            for name, server in wanted.items()
            if name not in self._built or self._built[name][0] != server.identity
        }
        if starts:  # first, because it may fail
            await self._prepare([new.plugin for new in made.values() if new.plugin is not None])
        gone = [self._built.pop(name)[1] for name in [*self._built] if name not in wanted]
        for old in gone:
            self._loaded.remove(old)
        changed = bool(gone or made)
        replaced = [*gone]
        for name, new in made.items():
            known = self._built.get(name)
            if known is None:
                self._loaded.add(new)
            else:
                self._loaded.replace(known[1], new)
                replaced.append(known[1])
            self._built[name] = (wanted[name].identity, new)
        changed |= self._show_fault(fault)
        self._servers = tuple(wanted.values())
        if not changed:
            return
        self._host.use(self._loaded.plugins)
        self._on_change()
        for old in replaced:
            if old.plugin is not None:
                self._tasks.begin(self._retire(old.plugin))
        if has_sdk() and starts:
            # Beside the rest: closing a server that does not answer takes time.
            self._tasks.begin(self.hub.keep_only(self._servers))

    def _imported(self, server: McpServer) -> Imported:
        path = f"mcp:{server.name} ({server.source.value})"
        base = Imported(path=path, module="", package="", key=server.plugin_key)
        if server.declaration is None:
            return dataclasses.replace(base, error=server.error)
        taken = next((p for p in self._others() if p.key == server.plugin_key), None)
        if taken is not None:
            return dataclasses.replace(base, error=f"key {server.plugin_key} is taken by another plugin")
        error = server.error if has_sdk() else SDK_MISSING
        return dataclasses.replace(base, plugin=build_plugin(server, self.hub), error=error)

    def _others(self) -> list[NekroPlugin]:
        own = {id(imported.plugin) for _, imported in self._built.values()}
        return [plugin for plugin in self._loaded.plugins if id(plugin) not in own]

    async def _prepare(self, plugins: Sequence[NekroPlugin]) -> None:
        """Start those of new plugins that are to run here.

        Raises:
            StorageUnavailableError: the database does not answer; none was started.
        """
        for plugin in plugins:
            plugin.set_enabled(await self._is_wanted(plugin))
        for plugin in plugins:
            if plugin.is_enabled and plugin.pinned and has_sdk() and self._may_run_here(plugin.key):
                await self._host.start_plugin(plugin)

    def _show_fault(self, fault: Imported | None) -> bool:
        known = next((one for one in self._loaded.found if one.key == _FILE_KEY), None)
        if known == fault:
            return False
        if known is not None:
            self._loaded.remove(known)
        if fault is not None:
            logger.bind(error=fault.error).error("mcp_file_not_read")
            self._loaded.add(fault)
        return True

    async def _retire(self, plugin: NekroPlugin) -> None:
        while is_in_use(plugin):  # noqa: ASYNC110 - runs end on other threads too
            await asyncio.sleep(POLL_SECONDS)
        await self._host.stop_plugin(plugin)

    # -- servers with a URL -----------------------------------------------------------------------

    async def _list_what_is_due(self) -> None:
        if not self._serves or not has_sdk():
            return
        for server in self._servers:
            declaration = server.declaration
            if declaration is None or declaration.is_stdio or server.name in self._listing:
                continue
            if server.is_current:
                seconds = self._settings.mcp.refresh_seconds
            else:
                seconds = _ATTEMPTS * self._settings.plugins.start_seconds
            async with self._database.autocommit() as transaction:
                is_mine = await ServerRows(transaction.connection).take(
                    server.name, digest=declaration.digest, seconds=seconds
                )
            if is_mine:
                self._listing.add(server.name)
                self._tasks.begin(self._list(server))

    async def _list(self, server: McpServer) -> None:
        try:
            with log_errors("mcp_server_not_listed", server=server.name):
                await self.hub.listing(server)
        finally:
            self._listing.discard(server.name)


_FILE_KEY: Final = "mcp.json"


def _broken_file(path: Path, fault: str | None) -> Imported | None:
    return (
        None if fault is None else Imported(path=str(path), module="", package="", key=_FILE_KEY, error=fault)
    )


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def try_on_worker(services: Services, plugin_key: str) -> dict[str, Any]:
    """Connect with an MCP server on a worker, as it is declared now; the answer is that of ``try_server``."""
    if (answer := await _untried(services.settings, services.database, plugin_key)) is not None:
        return answer
    # The start and the listing, each with its limit.
    seconds = 2 * services.settings.plugins.start_seconds + CLOSE_STEP_SECONDS
    answer = await services.fleet_hooks.ask_extension(plugin_key, _HOOK, seconds=seconds)
    return dict(answer)


async def _untried(settings: Settings, database: Database, plugin_key: str) -> dict[str, Any] | None:
    """Return the answer for a server that no worker uses; None if one may."""
    for server in await read_servers(settings, database):
        if server.plugin_key == plugin_key and (reason := unused_reason(server)) is not None:
            return _answer(server, reason)
    return None


async def try_server(servers: McpServers, plugin_key: str) -> dict[str, Any]:
    """Connect with the server of a plugin, list its tools, and say how it is confined; plain data.

    The declaration is the one that holds now. The answer has ``error``, which is None if the server works,
    ``about``, ``confinement`` (None for a server with a URL), ``tools`` and ``notes`` on faulty tools.

    Raises:
        MethodNotFoundError: no server that this process may use has the plugin, or it has lost it.
    """
    await servers.refresh()
    server = servers.server_of(plugin_key)
    if server is None or not servers.may_use(server):
        raise MethodNotFoundError(f"plugin {plugin_key!r} is not that of an MCP server of this worker")
    answer = _answer(server, server.error)
    if server.declaration is None:
        return answer
    if not has_sdk():
        return {**answer, "error": SDK_MISSING}
    from nekro.extensions.mcp.client.faults import ServerFault
    from nekro.extensions.mcp.client.tools import tools_text

    hide = redactor_of(server.declaration)
    try:
        opened, listing = await servers.hub.listing(server)
    except (ServerFault, InvalidValueError, SandboxUnavailableError, NekroError) as exc:
        return {**answer, "error": hide(str(exc))}
    from dataclasses import asdict, replace

    listed = replace(server, tools_text=tools_text(listing.tools), about=opened.session.about)
    plugin = build_plugin(listed, servers.hub)
    answer["error"] = None
    answer["about"] = opened.session.about
    answer["notes"] = listing.described_notes()
    if opened.confinement is not None:
        confinement = asdict(opened.confinement)
        answer["confinement"] = {**confinement, "files": list(confinement["files"])}
    answer["tools"] = [
        {
            "name": tool.name,
            "method": f"{plugin.key}.{method.func.__name__}",
            "signature": describe_signature(method.func),
            "requires_approval": needs_approval(listed, tool),
            "runs_once": method.once,
        }
        for tool, method in zip(listed.tools, plugin.sandbox_methods, strict=True)
    ]
    return answer


def _answer(server: McpServer, error: str | None) -> dict[str, Any]:
    return {
        "name": server.name, "plugin": server.plugin_key, "error": error, "about": None,
        "confinement": None, "tools": [], "notes": [],
    }  # fmt: skip


class McpPart(WorkerPart):
    """The MCP servers of a worker."""

    def __init__(self, services: ServicesOfWorker) -> None:
        """Build them; see ``WorkerPart``."""
        self.servers = McpServers(
            services.settings,
            services.database,
            services.loaded,
            services.host,
            serves=services.role in (Lane.METHODS.value, Lane.PINNED.value),
            may_run_here=services.may_run_here,
            is_wanted=services.states.wants,
            on_change=services.plugins_changed,
        )

    async def add_plugins(self) -> None:
        """Add the plugins of the declared servers."""
        await self.servers.read()

    async def start(self) -> None:
        """Follow changes of declarations and listings."""
        self.servers.start()

    async def close(self) -> None:
        """Close the connections."""
        await self.servers.close()

    @property
    def hooks(self) -> Mapping[str, Callable[[str], Awaitable[Any]]]:
        """How other processes try a server."""
        return {_HOOK: partial(try_server, self.servers)}
