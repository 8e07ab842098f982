"""The watchdog of event loops: what it detects, ignores and causes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nekro.plugins.entries import MethodEntry
from nekro.plugins.registry import LoadedRegistry
from nekro_agent.methods import SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from workers.plugins.loop_watchdog import BlockingMethod, LoopWatchdog


def entry_of(function: Callable[..., Any]) -> MethodEntry:
    plugin = NekroPlugin("W", "watched", "", "1", "tests", "")
    plugin.mount_sandbox_method(SandboxMethodType.TOOL, "x", "")(function)
    (entry,) = LoadedRegistry([plugin])
    return entry


async def watched(
    function: Callable[[], Any], seen: list[BlockingMethod], *, warn_seconds: float = 0.1
) -> Any:
    """Run a method under a watchdog that notes in ``seen``; returns its result or error."""
    watchdog = LoopWatchdog(warn_seconds=warn_seconds, on_block=seen.append, give_up_seconds=None)
    watchdog.start()
    try:
        result = await asyncio.gather(
            watchdog.follow(entry_of(function), function(), remaining_seconds=5),
            return_exceptions=True,
        )
    finally:
        watchdog.stop()
    return result[0]


async def test_a_blocking_method_is_detected_with_its_stack_while_it_blocks() -> None:
    seen: list[BlockingMethod] = []

    async def fetch_badly() -> str:
        """Blocks."""
        await asyncio.sleep(0)
        while not seen:
            time.sleep(0.01)
        return "done"

    result = await watched(fetch_badly, seen)
    (blocking,) = seen
    assert result == "done"
    assert blocking.entry.task == "tests.watched.fetch_badly" and blocking.seconds >= 0.1
    assert blocking.where.startswith("test_long_watchdog.py:") and blocking.where.endswith("fetch_badly")
    assert "time.sleep(0.01)" in blocking.stack


async def test_waiting_is_not_blocking_and_errors_pass() -> None:
    seen: list[BlockingMethod] = []

    async def wait() -> None:
        """Waits."""
        await asyncio.sleep(0.8)
        raise ValueError("own error")

    result = await watched(wait, seen, warn_seconds=0.5)
    assert isinstance(result, ValueError) and seen == []


async def test_a_watched_method_can_be_cancelled_and_may_catch_it() -> None:
    cleaned = asyncio.Event()

    async def wait() -> None:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    watchdog = LoopWatchdog(warn_seconds=1, on_block=lambda _: None, give_up_seconds=None)

    async def call() -> None:
        await watchdog.follow(entry_of(wait), wait(), remaining_seconds=5)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_after_a_pause_of_the_whole_process_no_method_is_reported() -> None:
    """When the watchdog's own thread was late, the time counts from its wake-up."""
    released = threading.Event()
    seen: list[BlockingMethod] = []

    async def hold_everything() -> None:
        """Blocks the loop and delays the watchdog."""
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            pass
        released.set()

    await watched(hold_everything, seen, warn_seconds=0.5)
    assert released.is_set() and seen == []
