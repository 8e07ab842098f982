"""Which plugins' routes and pages this worker serves, and at which addresses gateways find them.

Routes of an ordinary plugin run in workers of lane ``long``, each plugin on a thread with an event loop of
its own. That lane exists for code that blocks: a route that hangs stops only the routes of its own plugin,
and one that ends the process costs what a job that does so costs. Neither reaches the calls of methods.

Routes of a pinned plugin run in its owner, on the loop on which its init and its methods run, because they
share state that exists only there. The watchdog of that loop reports a route that blocks, like a method.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.base.tasks import end_tasks, log_errors, repeat
from nekro.plugins.entries import WebhookEntry
from nekro.wire.seals import HttpVerifier
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.methods import Lane
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from workers.plugins.loop_watchdog import LoopWatchdog

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from nekro.extensions.plugin_pages.worker.server import PluginServer

__all__ = ["PluginHosts"]

_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with


class PluginHosts:
    """The HTTP servers of one worker; ``start`` and ``close`` it on the loop of the services."""

    def __init__(
        self,
        *,
        role: str,
        key: str,
        database: Database,
        plugins: Callable[[], Iterable[NekroPlugin]],
        is_pinned: Callable[[str], bool],
        may_run_here: Callable[[str], bool],
        watchdog: LoopWatchdog | None,
        address: str,
        advertised: str | None,
        on_failure: Callable[[str, str], None],
    ) -> None:
        """Create it; nothing is served yet.

        Args:
            role: the worker's lane.
            key: the fleet's signing key.
            plugins: returns the plugins as they are loaded now.
            may_run_here: whether this process may run the plugin of a key: its owner if it is pinned.
            address: the address to listen on.
            advertised: the name or address by which gateways reach this host; None: ``address``.
            on_failure: called with the plugin's key and the reason why its routes could not be built.
        """
        self._role, self._key, self._database = role, key, database
        self._plugins, self._is_pinned, self._may_run_here = plugins, is_pinned, may_run_here
        self._watchdog = watchdog
        self._address = address
        self._host = advertised or (own_address() if address in _WILDCARDS else address)
        self._on_failure = on_failure
        self._servers: dict[str, tuple[NekroPlugin, PluginServer | None]] = {}
        self._addresses: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> Mapping[str, str]:
        """``host:port`` by the key of each plugin that is served now; replaced, never changed."""
        return self._addresses

    async def start(self) -> None:
        """Serve what this worker may serve, from now on."""
        await self._look()
        self._task = asyncio.create_task(
            repeat(self._look, seconds=FRESH_SECONDS, on_error="plugin_routes_not_served"),
            name="nekro-plugin-http",
        )

    async def close(self) -> None:
        """Stop all servers."""
        await end_tasks(self._task)
        await asyncio.gather(*map(self._stop, list(self._servers)))
        self._addresses = {}

    async def _look(self) -> None:
        wanted = {plugin.key: plugin for plugin in self._plugins() if self._serves(plugin)}
        for key, (plugin, _) in list(self._servers.items()):
            if wanted.get(key) is not plugin:  # another version was loaded, or its owner is another process
                await self._stop(key)
        for key, plugin in wanted.items():
            if key not in self._servers:
                self._servers[key] = (plugin, await self._started(plugin))
        found = {
            key: f"{f'[{self._host}]' if ':' in self._host else self._host}:{server.port}"
            for key, (_, server) in self._servers.items()
            if server is not None and server.answers()
        }
        if found != self._addresses:
            self._addresses = found

    def _serves(self, plugin: NekroPlugin) -> bool:
        if not serves_http(plugin):
            return False
        if self._is_pinned(plugin.key):
            return self._may_run_here(plugin.key)
        return self._role == Lane.LONG.value

    async def _started(self, plugin: NekroPlugin) -> PluginServer | None:
        """Return a running server; None if the plugin's routes cannot be built, until it is loaded again."""
        # Imported here, because FastAPI and uvicorn take memory and few workers need them.
        from nekro.extensions.plugin_pages.worker.server import PluginServer

        has_thread = not self._is_pinned(plugin.key)
        server = PluginServer(plugin.key, self._address, database=self._database, has_thread=has_thread)
        try:
            await server.start(partial(self._site, plugin, is_watched=not has_thread))
        except Exception as exc:  # the plugin's code, which must not stop the worker
            logger.opt(exception=exc).bind(plugin=plugin.key).error("plugin_routes_not_built")
            self._on_failure(plugin.key, f"its HTTP routes are not served: {exc}")
            return None
        logger.bind(plugin=plugin.key, port=server.port).info("plugin_routes_served")
        return server

    async def _stop(self, key: str) -> None:
        _, server = self._servers.pop(key)
        if server is not None:
            with log_errors("plugin_routes_not_stopped", plugin=key):
                await server.stop()

    def _site(self, plugin: NekroPlugin, *, is_watched: bool) -> ASGIApp:
        from nekro.extensions.plugin_pages.worker.site import PluginSite, application_of

        app = application_of(plugin)
        if is_watched and self._watchdog is not None:
            app = _watched(app, plugin.key, self._watchdog)
        return PluginSite(plugin, HttpVerifier(self._key), app)


def serves_http(plugin: NekroPlugin) -> bool:
    """Whether a plugin has routes or pages."""
    return plugin.hook("router") is not None or plugin.webui_path is not None


def own_address() -> str:
    """Return the address of this host's name, which other hosts reach it by in most networks."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return socket.gethostname()


def _watched(app: ASGIApp, plugin_key: str, watchdog: LoopWatchdog) -> ASGIApp:
    entry = WebhookEntry(endpoint="", task=f"{plugin_key}.router", plugin_key=plugin_key)

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            await app(scope, receive, send)

        await watchdog.follow(entry, work(), remaining_seconds=0)

    return watched
