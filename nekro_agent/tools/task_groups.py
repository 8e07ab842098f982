"""Runs coroutines and threads that start and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["in_thread", "result_unless_failed", "run_together"]

T = TypeVar("T")


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all; if one fails, cancel the others and raise its error unchanged."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def result_unless_failed(work: Coroutine[Any, Any, T], *keepers: asyncio.Task[None]) -> T:
    """Return the result of ``work``, unless a keeper fails first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, *keepers], return_when=asyncio.FIRST_COMPLETED)
        for keeper in keepers:
            if keeper.done():
                keeper.result()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a blocking function in a thread; if cancelled, return only after it has ended.

    Otherwise the caller would close the file that the function still uses.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise
