"""Timers as a service object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nekro_agent.api import timer as timers
from nekro_agent.core.logger import get_sub_logger

__all__ = ["TimerService", "timer_service"]

_log = get_sub_logger("timer")


class TimerService:
    """``timer_service`` of the reference."""

    def __init__(self) -> None:
        self._callbacks: set[asyncio.Task[None]] = set()

    async def set_timer(
        self,
        chat_key: str,
        trigger_time: int,
        event_desc: str,
        silent: bool = False,
        override: bool = False,
        temporary: bool | None = None,
        callback: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Set a timer.

        Args:
            silent: accepted for compatibility, no effect.
            override: clear the chat's other timers first.
            callback: called in this process instead of triggering the agent; unlike the chat's
                timers it does not survive the process.
        """
        if callback is not None:
            return self._call_later(trigger_time, callback)
        if override and not temporary:
            await timers.clear_timers(chat_key, temporary=False)
        set_one = timers.set_temp_timer if temporary else timers.set_timer
        return await set_one(chat_key, trigger_time, event_desc)

    def _call_later(self, trigger_time: int, callback: Callable[[], Awaitable[None]]) -> bool:
        delay_seconds = trigger_time - time.time()
        if delay_seconds < 0:
            return False

        async def run() -> None:
            await asyncio.sleep(delay_seconds)
            try:
                await callback()
            except Exception as exc:  # plugin code at the end of its own task
                _log.opt(exception=exc).error("timer_callback_failed")

        task = asyncio.get_running_loop().create_task(run())
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)
        return True


timer_service = TimerService()
