"""Detects the tasks that plugin code starts on the event loop and leaves running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

from nekro_agent.durations import POLL_SECONDS

__all__ = ["watched_tasks"]


_watched: ContextVar[list[asyncio.Task[Any]] | None] = ContextVar("nekro_watched_tasks", default=None)


class _NotingFactory:
    """The task factory of a loop while one or more blocks are watched; tells tasks by their context."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._before = loop.get_task_factory()
        self._blocks = 0

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Future[Any]:
        before = self._before
        made = before(loop, work, **options) if before else asyncio.Task(work, loop=loop, **options)
        mine = _watched.get()
        # A factory of other code may lie between two of these, which then see the same task.
        if mine is not None and isinstance(made, asyncio.Task) and made not in mine[-1:]:
            mine.append(made)
        return made

    def begin(self) -> None:
        """Count a block."""
        self._blocks += 1

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the end of a block; after the last one the loop has its former factory again.

        A factory that other code has set meanwhile stays, since it may call this one.
        """
        self._blocks -= 1
        if self._blocks == 0:
            if _factories.get(loop) is self:
                del _factories[loop]
            if loop.get_task_factory() is self:
                loop.set_task_factory(self._before)


#: Blocks overlap if several plugins are initialised at the same time, and any of them may end first.
_factories: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _NotingFactory]] = WeakKeyDictionary()


@asynccontextmanager
async def watched_tasks() -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Collect the tasks that the block starts, directly or through others.

    A context variable distinguishes them from tasks of other code that runs on the loop meanwhile.
    """
    loop = asyncio.get_running_loop()
    factory = _factory_of(loop)
    factory.begin()
    created: list[asyncio.Task[Any]] = []
    token = _watched.set(created)
    try:
        yield created
    finally:
        _watched.reset(token)
        factory.end(loop)
    if any(not task.done() for task in created):
        await asyncio.sleep(POLL_SECONDS)


def _factory_of(loop: asyncio.AbstractEventLoop) -> _NotingFactory:
    known = _factories.get(loop)
    is_set = loop.get_task_factory() is known
    if known is not None and is_set:
        return known
    made = _NotingFactory(loop)
    _factories[loop] = made
    loop.set_task_factory(made)
    return made
