"""The HTTP server of one plugin, on the event loop that the plugin's routes may occupy."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

import uvicorn
from loguru import logger
from starlette.types import ASGIApp

from nekro.base.greenlet_bridge import at_loop_close
from nekro_agent.durations import CLOSE_STEP_SECONDS
from storage.engine import Database
from workers.pools.jobs import LoopThread

__all__ = ["PluginServer"]

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
