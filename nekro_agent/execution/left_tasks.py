"""Detects the tasks that plugin code starts on the event loop and leaves running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from nekro_agent.durations import POLL_SECONDS

__all__ = ["watched_tasks"]


_watched: ContextVar[list[asyncio.Task[Any]] | None] = ContextVar("nekro_watched_tasks", default=None)


@asynccontextmanager
async def watched_tasks() -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Collect the tasks that the block starts, directly or through others.

    A context variable distinguishes them from tasks of other code that runs on the loop meanwhile.
    """
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    created: list[asyncio.Task[Any]] = []

    def factory(
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Future[Any]:
        made = before(loop, work, **options) if before else asyncio.Task(work, loop=loop, **options)
        mine = _watched.get()
        if mine is not None and isinstance(made, asyncio.Task):
            mine.append(made)
        return made

    loop.set_task_factory(factory)
    token = _watched.set(created)
    try:
        yield created
    finally:
        _watched.reset(token)
        loop.set_task_factory(before)
    if any(not task.done() for task in created):
        await asyncio.sleep(POLL_SECONDS)
