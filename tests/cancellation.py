"""Cancels work at each of its waits in turn."""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any


@types.coroutine
def cancelled_at(
    work: Coroutine[Any, Any, None], wait: int, *, again: bool = False
) -> Generator[Any, Any, None]:
    """Run work, and cancel the running task where the work waits for the n-th time.

    Args:
        wait: from 1.
        again: cancel at each later wait too.
    """
    task = asyncio.current_task()
    assert task is not None
    step: Callable[[], Any] = partial(work.send, None)
    for number in itertools.count(1):
        try:
            awaited = step()
        except StopIteration:
            return
        if number == wait or (again and number > wait):
            task.get_loop().call_soon(task.cancel)
        try:
            yield awaited
        except BaseException as exc:
            step = partial(work.throw, exc)
        else:
            step = partial(work.send, None)
