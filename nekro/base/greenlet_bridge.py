"""Lets Celery's synchronous code wait for coroutines on the event loop that runs it.

The asyncio pool runs each task, including Celery's tracer, in a greenlet on its event loop.
Code in such a greenlet can wait for a coroutine with ``await_here`` while the loop runs other
tasks. Elsewhere (in a thread, in the worker's main process) ``can_await`` is False and callers
use their blocking path.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet
from loguru import logger

from nekro_agent.durations import CLOSE_STEP_SECONDS

__all__ = [
    "Closing",
    "at_loop_close",
    "await_here",
    "can_await",
    "close_all",
    "close_loop_resources",
    "limit_loop_close",
    "seconds_to_close",
    "spawn",
]

T = TypeVar("T")
P = ParamSpec("P")
Cleanup = Callable[[], Awaitable[object]]

#: Minimum time of each cleanup, regardless of how long the previous ones took, and of the end of one that
#: was cancelled because of its limit.
LEAST_SECONDS: Final = 0.5
#: Idle greenlets kept per thread. Creating one takes tens of microseconds, because memory for its frames is
#: mapped, touched and unmapped each time.
MAX_IDLE: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """One step of a shutdown."""

    #: Its name in the log.
    what: str
    cleanup: Cleanup
    #: Time limit of this step, within the limit that all steps share.
    seconds: float


@dataclass(kw_only=True)
class _LoopClose:
    """Cleanups to run before a loop is closed."""

    steps: list[Closing] = field(default_factory=list)
    #: Time limit of all steps together.
    seconds: float = 2 * CLOSE_STEP_SECONDS


_closings: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClose] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


class _Runner(greenlet):  # type: ignore[misc]  # greenlet has no types
    """Runs one function after another; ``await_here`` works inside.

    A runner whose function raises ends with it, so that only runners in a clean state are reused.
    """

    def run(self, function: Callable[[], Any]) -> None:
        """Switch to the parent with awaitables to wait for, and with each function's wrapped result."""
        while True:
            returned = _Returned(function())
            del function
            function = self.parent.switch(returned)
            del returned


class _Idle(threading.local):
    """Idle greenlets of this thread."""

    def __init__(self) -> None:
        self.runners: list[_Runner] = []


_idle = _Idle()


async def spawn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a synchronous function in a greenlet.

    Source: the technique of SQLAlchemy's ``greenlet_spawn``; here greenlets are reused.
    """
    idle = _idle.runners
    runner = idle.pop() if idle else _Runner()
    driver = getcurrent()
    runner.parent, runner.gr_context = driver, driver.gr_context
    outcome = runner.switch(partial(function, *args, **kwargs))
    while not isinstance(outcome, _Returned):
        try:
            value = await outcome
        except BaseException as exc:  # including cancellation: the function handles it
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


def can_await() -> bool:
    """Whether the calling code runs in a greenlet that ``spawn`` started."""
    return isinstance(getcurrent(), _Runner)


def await_here(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable in synchronous code; requires that ``can_await`` is True."""
    value: T = getcurrent().parent.switch(awaitable)
    return value


def at_loop_close(cleanup: Cleanup, *, seconds: float = CLOSE_STEP_SECONDS, what: str | None = None) -> None:
    """Run ``cleanup`` on the running loop before its owner closes it; the newest runs first.

    It is meant for resources of one loop, such as connections and database engines.

    Args:
        seconds: time limit, see ``close_all``; later cleanups run in any case.
        what: name in the log; None means the function's name.
    """
    name: str = what or getattr(cleanup, "__qualname__", "") or repr(cleanup)
    _closing_of_this_loop().steps.append(Closing(what=name, cleanup=cleanup, seconds=seconds))


def limit_loop_close(seconds: float) -> None:
    """Set the time limit of all cleanups of the running loop together."""
    _closing_of_this_loop().seconds = seconds


def _closing_of_this_loop() -> _LoopClose:
    return _closings.setdefault(asyncio.get_running_loop(), _LoopClose())


def seconds_to_close(loop: asyncio.AbstractEventLoop) -> float:
    """Return the longest time that ``close_loop_resources`` takes on a loop if no cleanup blocks it."""
    closing = _closings.get(loop, _LoopClose())
    count = len(closing.steps)
    alone = sum(step.seconds for step in closing.steps)
    return max(min(alone, closing.seconds), count * LEAST_SECONDS) + count * LEAST_SECONDS


async def close_loop_resources() -> None:
    """Run the cleanups of the running loop; a failing cleanup does not affect the others."""
    closing = _closings.pop(asyncio.get_running_loop(), _LoopClose())
    await close_all(closing.steps[::-1], seconds=closing.seconds)


async def close_all(steps: Sequence[Closing], *, seconds: float) -> None:
    """Run the steps of a shutdown in order.

    A step that fails, or is abandoned because it exceeds its time limit, is logged; then the next one runs.

    Args:
        seconds: time limit of all steps together. Each step has at most its own limit and the time that
            remains, but at least ``LEAST_SECONDS``, which is reserved for each later step.
    """
    end = time.monotonic() + seconds
    for number, step in enumerate(steps, start=1):
        left = end - time.monotonic() - LEAST_SECONDS * (len(steps) - number)
        await _close_within(step, max(LEAST_SECONDS, min(step.seconds, left)))


async def _close_within(step: Closing, seconds: float) -> None:
    task = asyncio.ensure_future(_logged(step))
    if (await asyncio.wait({task}, timeout=seconds))[0]:
        return
    logger.bind(what=step.what, seconds=round(seconds, 1)).warning("cleanup_abandoned")
    task.cancel()
    await asyncio.wait({task}, timeout=LEAST_SECONDS)


async def _logged(step: Closing) -> None:
    try:
        await step.cleanup()
    except Exception:  # the remaining steps of the shutdown must run
        logger.bind(what=step.what).exception("cleanup_failed")
