"""Waits of the tests: one limit, which only a hang reaches, and failures that report the last value."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

#: Longer than a passing test waits on the busiest machine; the time limit of a test is longer still.
WAIT_SECONDS = 180.0
POLL_SECONDS = 0.02

#: Describes the condition; a function is called after a failure, to show logs as they are then.
What = str | Callable[[], str]


def wait_until(
    condition: Callable[[], Any], *, what: What = "the condition", seconds: float = WAIT_SECONDS
) -> Any:
    """Poll ``condition`` until it returns something true, and return that.

    Fail with ``what`` and the last value after ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            _fail(what, value, seconds)
        time.sleep(POLL_SECONDS)
    return value


async def eventually(
    condition: Callable[[], Any], *, what: What = "the condition", seconds: float = WAIT_SECONDS
) -> Any:
    """Poll a plain or async ``condition`` on the event loop, as `wait_until` does."""
    value: Any = "no answer"
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        if not limit.expired():
            raise
    _fail(what, value, seconds)


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail when the block uses more processor time; waiting for a processor does not count."""

    def stop(*_: object) -> None:
        pytest.fail(f"it took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _fail(what: What, value: Any, seconds: float) -> None:
    wanted = what if isinstance(what, str) else what()
    pytest.fail(f"waited {seconds:g} s for {wanted}\nlast seen: {value!r}")
