"""Which lanes have a worker, for commands that talk to somebody else's fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from celery import Celery

from nekro_agent.errors import ServiceError

__all__ = ["awaited_with_workers", "served_lanes"]

T = TypeVar("T")

#: A call that is answered sooner costs no question.
_PATIENCE_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 1.0


def served_lanes(app: Celery) -> set[str]:
    """Ask the workers on the broker which lanes they serve; takes a second."""
    answers = app.control.inspect(timeout=_ANSWER_SECONDS).active_queues() or {}
    return {queue["name"] for queues in answers.values() for queue in queues}


async def awaited_with_workers(work: Awaitable[T], app: Celery, *, lane: str) -> T:
    """Await ``work``, but not in vain.

    Raises:
        ServiceError: it takes its time and no worker serves the lane; ``work`` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=_PATIENCE_SECONDS)
        if not done and lane not in await asyncio.to_thread(served_lanes, app):
            raise ServiceError(
                f"no worker serves lane {lane}; start `nekro worker --lane {lane}` or `nekro up`"
            )
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
