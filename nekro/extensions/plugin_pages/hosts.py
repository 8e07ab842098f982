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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.base.greenlet_bridge import at_loop_close
from nekro.base.loop_thread import LoopThread
from nekro.base.tasks import end_tasks, log_errors, repeat
from nekro.plugins.entries import WebhookEntry
from nekro.wire.seals import HttpVerifier
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS
from nekro_agent.methods import Lane
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from workers.extensions import ServicesOfWorker, WorkerPart
from workers.plugins.loop_watchdog import LoopWatchdog

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send


__all__ = [
    "PluginHosts",
    "PluginServer",
]


#: Connections to one plugin; a gateway asks for fewer.
_MOST_CONNECTIONS: Final = 512
#: A loop that does not run for this long is reported as blocked.
_BLOCKED_SECONDS: Final = 5.0
#: Longer than gateways keep an idle connection, so that they close it and no request is lost.
_KEEP_ALIVE_SECONDS: Final = 30

_FRAMES: Final = 12


class PluginServer:
    """Serves one plugin on a free port; ``start`` and ``stop`` it on the loop of the services."""

    def __init__(self, plugin_key: str, address: str, *, database: Database, has_thread: bool) -> None:
        """Create the server.

        Args:
            has_thread: run on a thread and a loop of its own, so that a route that blocks stops only its own
                plugin; else on the loop of the services, where the plugin's init and methods run.
        """
        self.plugin_key = plugin_key
        self._address = address
        self._database = database
        self._thread = LoopThread(f"nekro-http-{plugin_key}") if has_thread else None
        self._server: uvicorn.Server | None = None
        self._running: asyncio.Task[None] | None = None
        self._answered_at = time.monotonic()
        self._thread_id = 0
        self._is_reported = False
        self.port = 0

    async def start(self, make_app: Callable[[], ASGIApp]) -> None:
        """Build the application on the server's loop, and serve it.

        Raises:
            OSError: the address is not one of this host.
            Exception: what ``make_app`` raised.
        """
        if self._thread is None:
            await self._serve(make_app)
            return
        self._thread.start()
        work = asyncio.run_coroutine_threadsafe(self._serve(make_app), self._thread.loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(work), CLOSE_STEP_SECONDS)
        except BaseException:
            await asyncio.to_thread(self._thread.stop)
            raise

    async def stop(self) -> None:
        """Stop listening; requests that run longer than a moment are cut."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        elif self._running is not None:
            await asyncio.wait([self._running], timeout=CLOSE_STEP_SECONDS)

    def answers(self) -> bool:
        """Whether the server's loop runs; reports where it is blocked, once. Call it about every second."""
        if self._thread is None:
            return True  # the watchdog of the loop checks it
        seconds = time.monotonic() - self._answered_at
        self._thread.call(self._answer)
        if seconds < _BLOCKED_SECONDS:
            self._is_reported = False
            return True
        if not self._is_reported:
            self._is_reported = True
            self._report(seconds)
        return False

    def _answer(self) -> None:
        self._answered_at = time.monotonic()

    def _report(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""
        logger.bind(plugin=self.plugin_key, seconds=round(seconds, 1)).error(f"plugin_routes_block\n{stack}")

    async def _serve(self, make_app: Callable[[], ASGIApp]) -> None:
        import uvicorn  # takes memory, and few workers need it

        self._thread_id = threading.get_ident()
        if self._thread is not None:
            at_loop_close(self._database.dispose_loop)
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family)
        try:
            config = uvicorn.Config(
                make_app(),
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        except BaseException:
            listener.close()
            raise
        self.port = int(listener.getsockname()[1])
        self._server = uvicorn.Server(config)
        self._running = asyncio.create_task(self._server.serve([listener]), name=f"http {self.plugin_key}")
        if self._thread is not None:
            at_loop_close(self._shut_down)

    async def _shut_down(self) -> None:
        if self._server is not None and self._running is not None:
            self._server.should_exit = True
            await asyncio.wait([self._running], timeout=CLOSE_STEP_SECONDS)


_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with


class PluginHosts(WorkerPart):
    """The HTTP servers of one worker; ``start`` and ``close`` it on the loop of the services."""

    def __init__(self, services: ServicesOfWorker) -> None:
        """Create it; nothing is served yet."""
        settings = services.settings.workers
        self._services, self._key, self._database = services, services.signing_key, services.database
        self._address = settings.http_address
        is_any = self._address in _WILDCARDS
        self._host = settings.http_advertise or (own_address() if is_any else self._address)
        self._servers: dict[str, tuple[NekroPlugin, PluginServer | None]] = {}
        self._addresses: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def sites(self) -> Mapping[str, str]:
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
        wanted = {plugin.key: plugin for plugin in self._services.host.plugins if self._serves(plugin)}
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
        if self._services.lanes.is_pinned(plugin.key):
            return self._services.may_run_here(plugin.key)
        return self._services.role == Lane.LONG.value

    async def _started(self, plugin: NekroPlugin) -> PluginServer | None:
        """Return a running server; None if the plugin's routes cannot be built, until it is loaded again."""
        has_thread = not self._services.lanes.is_pinned(plugin.key)
        server = PluginServer(plugin.key, self._address, database=self._database, has_thread=has_thread)
        try:
            await server.start(partial(self._site, plugin, is_watched=not has_thread))
        except Exception as exc:  # the plugin's code, which must not stop the worker
            logger.opt(exception=exc).bind(plugin=plugin.key).error("plugin_routes_not_built")
            self._services.loaded.add_error(plugin.key, f"its HTTP routes are not served: {exc}")
            return None
        logger.bind(plugin=plugin.key, port=server.port).info("plugin_routes_served")
        return server

    async def _stop(self, key: str) -> None:
        _, server = self._servers.pop(key)
        if server is not None:
            with log_errors("plugin_routes_not_stopped", plugin=key):
                await server.stop()

    def _site(self, plugin: NekroPlugin, *, is_watched: bool) -> ASGIApp:
        # Imported here, because FastAPI takes memory and few workers need it.
        from nekro.extensions.plugin_pages.site import PluginSite, application_of

        app = application_of(plugin)
        watchdog = self._services.watchdog
        if is_watched and watchdog is not None:
            app = _watched(app, plugin.key, watchdog)
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
