"""The connection of one process to one server: started, restarted with back-off, closed.

A task of its own holds the session, because the SDK's contexts must end in the task in which they began.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, Final

from loguru import logger

from nekro.base.tasks import end_tasks
from nekro.extensions.mcp.client.faults import ServerFault
from nekro.extensions.mcp.client.session import Exchange, McpSession
from nekro.extensions.mcp.client.tools import Listing, line
from nekro.sandbox.programs import Confinement
from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS, RETRY_SECONDS
from nekro_agent.errors import NekroError

__all__ = ["OpenSession", "Opened", "ServerConnection"]

#: After a session that lasted so long, a restart has no pause.
_LASTED_SECONDS: Final = 10.0
#: Longest pause before a restart and before another listing. The first pauses are ``RETRY_SECONDS`` and
#: ``FRESH_SECONDS``; each further one is twice as long.
_LONGEST_PAUSE_SECONDS: Final = 60.0
#: Calls wait for a restart if the pause before it is at most this long; else they fail at once.
_SHORT_PAUSE_SECONDS: Final = 2.0
#: How long calls may go on when the connection is closed because the declaration changed.
_GRACE_SECONDS: Final = 5.0
_MOST_ERROR_CHARS: Final = 1_000


class Opened:
    """An open transport and its session, as ``OpenSession`` yields it."""

    def __init__(
        self,
        session: McpSession,
        *,
        ended: asyncio.Event | None = None,
        why_it_ended: Callable[[], str] = lambda: "the connection was lost",
        verify: Callable[[], None] = lambda: None,
        confinement: Confinement | None = None,
    ) -> None:
        """
        Args:
            ended: set when the transport ends; None where only requests show it.
            verify: checks the isolation after the server has answered.
        """
        self.session, self.ended, self.why_it_ended, self.verify = session, ended, why_it_ended, verify
        self.confinement = confinement


#: Opens a session; entered and left in one task. The argument is whether ``initialize`` must come first.
OpenSession = Callable[[bool], contextlib.AbstractAsyncContextManager[Opened]]


class ServerConnection:
    """Keeps one session; several calls use it at the same time."""

    def __init__(
        self,
        name: str,
        open_session: OpenSession,
        *,
        stays: bool,
        start_seconds: float,
        idle_seconds: float,
        initialize_first: bool,
        hide: Callable[[str], str],
        on_listed: Callable[[Listing, dict[str, Any]], Awaitable[None]],
        on_failed: Callable[[str], Awaitable[None]],
    ) -> None:
        """Create it; nothing is opened yet.

        Args:
            stays: whether it is opened again when it ends, and never idle.
            initialize_first: whether the server is known to need ``initialize`` as its first message.
            hide: removes secrets from texts.
            on_listed: called with each listing of tools.
            on_failed: called with each reason why it could not be opened.
        """
        self._name, self._open, self._stays = name, open_session, stays
        self._start_seconds, self._idle_seconds = start_seconds, idle_seconds
        self._hide, self._on_listed, self._on_failed = hide, on_listed, on_failed
        self._initialize_first = initialize_first
        #: Whether the server is started once more at once, with `initialize` first.
        self._starts_again = False
        self._task: asyncio.Task[None] | None = None
        #: Tasks of lost sessions, in which calls are still open.
        self._draining: set[asyncio.Task[None]] = set()
        self._opened: Opened | None = None
        #: The session that was listed last, with its tools or why it could not list them.
        self._listed: tuple[Opened, Listing | ServerFault] | None = None
        self._listing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closing = asyncio.Event()
        #: Why the last attempt failed, and when the next one is.
        self._error: str | None = None
        self._next_at = 0.0
        #: Why the attempt before failed; None after one that did not.
        self._reason: str | None = None

    def start(self) -> None:
        """Open the session in the background, unless that is so already."""
        if self._is_closing.is_set():
            raise ServerFault("its declaration has changed; call it again", is_unsent=True)
        if self._task is None or self._task.done():
            self._error = None
            # Not in the caller's context: holders share the session, and its task belongs to none of them.
            # The tasks that the init hook of a plugin leaves are cancelled with that plugin.
            self._task = Context().run(asyncio.create_task, self._keep(), name=f"mcp-{self._name}")

    async def call(
        self, tool: str, arguments: dict[str, Any], *, exchange: Exchange, seconds: float | None
    ) -> Any:
        """Call a tool.

        Raises:
            ServerFault: as from ``McpSession.call``; ``is_unsent`` also if there is no session.
        """
        opened = await self.opened()
        try:
            return await opened.session.call(tool, arguments, exchange=exchange, seconds=seconds)
        except ServerFault as exc:
            if exc.is_lost and opened.ended is not None:
                raise ServerFault(f"{opened.why_it_ended()}", is_lost=True) from exc
            raise

    async def opened(self) -> Opened:
        """Return the open session; opens it if there is none.

        Raises:
            ServerFault: it cannot be opened; nothing was sent.
        """
        # Longer than a start, whose failure has a reason.
        give_up_at = time.monotonic() + self._start_seconds + _GRACE_SECONDS
        self.start()
        while True:
            opened = self._opened
            if opened is not None and not opened.session.is_broken.is_set():
                opened.session.used_at = time.monotonic()
                return opened
            pause = self._next_at - time.monotonic() if self._stays else 0.0
            if self._error is not None and (pause > _SHORT_PAUSE_SECONDS or not self._stays):
                later = f"; the next attempt is in {pause:.0f} s" if pause > 0 else ""
                raise ServerFault(f"{self._error}{later}", is_unsent=True)
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                reason = self._reason or f"it was not ready within {self._start_seconds:g} s"
                raise ServerFault(reason, is_unsent=True) from None
            if self._error is None and self._opened is None:
                self.start()  # it ended without an error: an idle session, or one of a former declaration

    async def listing(self) -> tuple[Opened, Listing]:
        """List the tools now; returns the session and what it listed.

        Raises:
            ServerFault: it cannot be opened, or failed.
        """
        opened = await self.opened()
        listed = await self._list(opened)
        if not isinstance(listed, Listing) and opened.session.is_broken.is_set():
            opened = await self.opened()
            listed = await self._list(opened)
        if isinstance(listed, Listing):
            return opened, listed
        raise listed

    async def close(self, *, grace: bool = False) -> None:
        """End the session.

        Args:
            grace: whether open calls get a moment to end.
        """
        give_up_at = time.monotonic() + _GRACE_SECONDS
        # Polls, as no event reports the end of the last call.
        while grace and self._opened and not self._opened.session.is_idle and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        self._is_closing.set()
        tasks = [task for task in (self._task, *self._draining) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=2 * _GRACE_SECONDS)
            await end_tasks(*tasks)

    async def _keep(self) -> None:
        try:
            await self._reopen_until_closed()
        finally:
            self._changed.set()  # also if it is cancelled: callers then start it again

    async def _reopen_until_closed(self) -> None:
        pause = 0.0
        while not self._is_closing.is_set():
            began, error = time.monotonic(), None
            try:
                await self._serve()
            except Exception as exc:  # the server's fault, whatever it is; the worker must go on
                if self._starts_again:
                    self._starts_again = False
                    continue
                error = self._hide(_error_line(exc))
            if self._is_closing.is_set() or self._is_detached() or (error is None and not self._stays):
                break
            if error is not None:
                logger.bind(server=self._name, error=error).warning("mcp_server_failed")
            lasted = time.monotonic() - began >= _LASTED_SECONDS
            pause = 0.0 if lasted else min(max(2 * pause, RETRY_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._error = self._reason = error
            self._next_at = time.monotonic() + pause
            self._changed.set()
            if error is not None:
                await self._on_failed(error)
            if not self._stays:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._is_closing.wait()
            self._error = None

    async def _serve(self) -> None:
        """Open a session and keep it until it ends."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._start_seconds):
                    opened = await stack.enter_async_context(self._open(self._initialize_first))
                    await self._begin(opened)
            except TimeoutError:
                self._initialize_first = True  # perhaps it waits for that
                raise ServerFault(f"it did not answer within {self._start_seconds:g} s") from None
            opened.session.is_stale.set()
            self._opened, self._error, self._reason = opened, None, None
            self._changed.set()
            try:
                await self._until_it_ends(opened)
            finally:
                if self._opened is opened:
                    self._opened = None  # before it is closed, which over HTTP takes a request
                self._changed.set()
            if opened.session.is_broken.is_set() and opened.ended is None and not self._is_closing.is_set():
                await self._drain(opened)
            if opened.ended is not None and opened.ended.is_set() and not self._is_closing.is_set():
                raise ServerFault(opened.why_it_ended())

    async def _begin(self, opened: Opened) -> None:
        try:
            await opened.session.greet()
            self._initialize_first |= opened.session.has_ignored_first
            opened.verify()
        except ServerFault as exc:
            if opened.session.has_asked_first and not exc.is_unsent:
                # It may not survive a first message other than `initialize`.
                self._initialize_first = self._starts_again = True
            if exc.is_lost and opened.ended is not None:
                # The reason arrives with the end of the process.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await opened.ended.wait()
                raise ServerFault(opened.why_it_ended()) from exc
            raise

    async def _list(self, opened: Opened) -> Listing | ServerFault:
        """List the tools, unless another task begins to do so meanwhile.

        What fails here does not end the session: calls may work.
        """
        before = self._listed
        async with self._listing:
            known = self._listed
            if known is not None and known is not before and known[0] is opened:
                return known[1]
            opened.session.is_stale.clear()
            found = await self._read_listing(opened.session)
            if self._stays and not isinstance(found, Listing):
                opened.session.is_stale.set()  # other servers are listed again by a worker
            self._listed = opened, found
            return found

    async def _read_listing(self, session: McpSession) -> Listing | ServerFault:
        try:
            async with asyncio.timeout(self._start_seconds):
                listing = await session.listing()
        except TimeoutError:
            fault = ServerFault(f"it did not list its tools within {self._start_seconds:g} s")
        except ServerFault as exc:
            fault = exc
        else:
            starts = {"starts_with": "initialize"} if self._initialize_first else {}
            await self._on_listed(listing, {**session.about, **starts})
            return listing
        if not session.is_broken.is_set():
            error = self._hide(_error_line(fault))
            logger.bind(server=self._name, error=error).warning("mcp_server_not_listed")
            await self._on_failed(error)
        return fault

    async def _drain(self, opened: Opened) -> None:
        """Leave the connection to a new session, and keep the lost one until its calls have ended.

        The server answers each of them, with a refusal or with a result that it had begun before.
        """
        task = asyncio.current_task()
        if task is not None and task is self._task:
            self._task = None
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
            self._changed.set()
        # Polls, as no event reports the end of the last call.
        while not opened.session.is_idle and not self._is_closing.is_set():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _is_detached(self) -> bool:
        return asyncio.current_task() in self._draining

    async def _until_it_ends(self, opened: Opened) -> None:
        session = opened.session
        events = [session.is_stale, session.is_broken, self._is_closing]
        events += [] if opened.ended is None else [opened.ended]
        pause, listed_at = FRESH_SECONDS, 0.0
        while True:
            limit = None if self._stays else self._idle_seconds
            await _first_of(events, seconds=limit)
            if any(event.is_set() for event in events[1:]):
                return
            if session.is_stale.is_set():
                # Every worker builds the methods again: a server that goes on changing is listed less often.
                is_calm = time.monotonic() - listed_at > 2 * pause
                pause = FRESH_SECONDS if is_calm else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                listing = asyncio.ensure_future(self._list(opened))
                try:
                    await _first_of([*events[1:], _done(listing)], seconds=None)
                finally:
                    await end_tasks(listing)
                listed_at = time.monotonic()
                await _first_of(events[1:], seconds=pause)
            elif session.is_idle and time.monotonic() - session.used_at >= self._idle_seconds:
                return


def _done(task: asyncio.Future[Any]) -> asyncio.Event:
    """Return an event that is set when a task has ended."""
    event = asyncio.Event()
    task.add_done_callback(lambda _: event.set())
    return event


async def _first_of(events: list[asyncio.Event], *, seconds: float | None) -> None:
    """Wait until one of the events is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*waits)


def _error_line(exc: BaseException) -> str:
    """Return an error as one line; of a group, its first error."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    text = line(exc, _MOST_ERROR_CHARS)
    known = isinstance(exc, ServerFault | NekroError)
    return text if known and text else f"{type(exc).__name__}: {text}".rstrip(": ")
