"""The one way from Celery's synchronous code to coroutines on the loop that runs it.

The asyncio pool runs each task, Celery's tracer included, in a greenlet on its event loop.
Code in such a greenlet may wait for a coroutine with ``await_here``; the loop goes on with
other tasks meanwhile. Outside of one (a thread, the worker's main process) ``can_await`` is
False and callers take their blocking path.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from broker_config.completion import outlast

__all__ = [
    "at_loop_close",
    "await_here",
    "can_await",
    "close_loop_resources",
    "close_within",
    "seconds_to_close",
    "spawn",
    "spawn_cleanly",
]

T = TypeVar("T")
P = ParamSpec("P")
Cleanup = Callable[[], Awaitable[object]]

#: How long a cleanup of a loop may take that does not say otherwise.
CLEANUP_SECONDS: Final = 5.0
#: How long a cleanup that was cancelled because it took too long may take to end.
CANCELLED_SECONDS: Final = 1.0
#: Idle greenlets kept per thread. A new one costs tens of microseconds: memory for its frames is mapped,
#: touched and unmapped each time.
MAX_IDLE: Final = 256

logger = logging.getLogger(__name__)
_cleanups: WeakKeyDictionary[asyncio.AbstractEventLoop, list[tuple[Cleanup, float]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


class _Runner(greenlet):  # type: ignore[misc]  # greenlet has no types
    """Runs one function after another; SQLAlchemy's ``await_only`` works inside.

    One whose function raises ends with it: only what is known to be clean is used again.
    """

    __sqlalchemy_greenlet_provider__ = True

    def run(self, function: Callable[[], Any]) -> None:
        """Hand out awaitables to wait for and, wrapped, each function's value."""
        while True:
            returned = _Returned(function())
            del function
            function = self.parent.switch(returned)
            del returned


class _Idle(threading.local):
    """This thread's greenlets that have nothing to do."""

    def __init__(self) -> None:
        self.runners: list[_Runner] = []


_idle = _Idle()


async def _run(function: Callable[[], T], wait_for: Callable[[Any], Awaitable[Any]] | None = None) -> T:
    idle = _idle.runners
    runner = idle.pop() if idle else _Runner()
    driver = getcurrent()
    runner.parent, runner.gr_context = driver, driver.gr_context
    outcome = runner.switch(function)
    while not isinstance(outcome, _Returned):
        try:
            value = await (outcome if wait_for is None else wait_for(outcome))
        except BaseException as exc:  # cancellation included: it belongs to the function
            runner.parent = getcurrent()
            outcome = runner.throw(type(exc), exc, exc.__traceback__)
        else:
            runner.parent = getcurrent()
            outcome = runner.switch(value)
    runner.gr_context = None
    if len(idle) < MAX_IDLE:
        idle.append(runner)
    result: T = outcome.value
    return result


def spawn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    """Return a coroutine that runs a synchronous function in a greenlet of its own.

    Source: the technique of SQLAlchemy's ``greenlet_spawn``; greenlets are kept for the next call.
    """
    return _run(partial(function, *args, **kwargs))


async def spawn_cleanly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function as ``spawn`` does, and let it clean up after a cancellation undisturbed.

    The first cancellation reaches the function. What it awaits from then on is run to its end; a
    further cancellation is raised when the function has ended.
    """
    waiting = _CleanWait()
    try:
        return await _run(partial(function, *args, **kwargs), waiting.wait_for)
    finally:
        if waiting.later is not None:
            raise waiting.later


class _CleanWait:
    """How ``spawn_cleanly`` waits."""

    __slots__ = ("_is_cancelled", "later")

    def __init__(self) -> None:
        self._is_cancelled = False
        self.later: asyncio.CancelledError | None = None

    async def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        if not self._is_cancelled:
            try:
                return await awaitable
            except asyncio.CancelledError:
                self._is_cancelled = True
                raise
        future = asyncio.ensure_future(awaitable)
        self.later = await outlast(future) or self.later
        return future.result()


def can_await() -> bool:
    """Whether the calling code runs in a greenlet that ``spawn`` started."""
    return in_greenlet()


def await_here(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable from synchronous code; only where ``can_await`` is True."""
    return await_only(awaitable)


def at_loop_close(cleanup: Cleanup, *, seconds: float = CLEANUP_SECONDS) -> None:
    """Run ``cleanup`` on the running loop before its owner closes it; the newest runs first.

    For what belongs to one loop: connections, database engines.

    Args:
        seconds: how long it may take; those after it run in any case.
    """
    _cleanups.setdefault(asyncio.get_running_loop(), []).append((cleanup, seconds))


def seconds_to_close(loop: asyncio.AbstractEventLoop) -> float:
    """How long ``close_loop_resources`` takes on a loop at most, as long as no cleanup blocks it."""
    return sum(seconds + CANCELLED_SECONDS for _, seconds in _cleanups.get(loop, ()))


async def close_loop_resources() -> None:
    """Run the cleanups of the running loop, each within its own time; what one does stops no other."""
    for cleanup, seconds in reversed(_cleanups.pop(asyncio.get_running_loop(), [])):
        await close_within(cleanup, what=getattr(cleanup, "__qualname__", repr(cleanup)), seconds=seconds)


async def close_within(cleanup: Cleanup, *, what: str, seconds: float) -> None:
    """Run a cleanup. One that fails, or takes longer and is left behind, is logged: what follows it runs.

    Args:
        what: name of it in the log.
    """
    task = asyncio.ensure_future(_logged(cleanup, what))
    if (await asyncio.wait({task}, timeout=seconds))[0]:
        return
    logger.warning("%s took longer than %g s to close; left behind", what, seconds)
    task.cancel()
    await asyncio.wait({task}, timeout=CANCELLED_SECONDS)


async def _logged(cleanup: Cleanup, what: str) -> None:
    try:
        await cleanup()
    except Exception:  # a process that stops must get to its end
        logger.exception("%s could not be closed", what)
