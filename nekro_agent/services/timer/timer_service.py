"""Timers as a service object."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from nekro_agent import runtime
from nekro_agent.api import timer as timers
from nekro_agent.api.timer import TimerTask
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.execution.invoke import run_callable

__all__ = ["TimerService", "TimerTask", "timer_service"]

_log = get_sub_logger("timer")


class TimerService:
    """``timer_service`` of the reference.

    A timer with a callback exists in this process only; it is listed and deleted like the others.
    """

    def __init__(self) -> None:
        self._own: dict[str, TimerTask] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

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
        """Set a timer, or clear the chat's timers with a negative ``trigger_time``.

        Args:
            silent: accepted for compatibility, no effect.
            override: set the chat's only temporary timer, which replaces the one before.
            temporary: which timers a negative ``trigger_time`` clears; None means all.
            callback: called in this process instead of triggering the agent; unlike the chat's
                timers it does not survive the process.
        """
        if trigger_time < 0:
            self._clear(chat_key, temporary)
            return await timers.clear_timers(chat_key, temporary)
        if callback is not None and trigger_time > 0:
            return self._call_later(chat_key, trigger_time, event_desc, override, callback)
        set_one = timers.set_temp_timer if override else timers.set_timer
        return await set_one(chat_key, trigger_time, event_desc)

    def get_timers(self, chat_key: str) -> timers.TimerList:
        """Return the chat's timers, soonest first, then those with a callback in the order of setting.

        The result is used like that of ``nekro_agent.api.timer.get_timers``.
        """
        return timers.TimerList(chat_key, self._of_chat(chat_key))

    async def delete_timer_by_id(self, task_id: str) -> bool:
        """Cancel the timer with this ``task_id``; False if it has fired or does not exist."""
        if task_id in self._own:
            self._drop(task_id)
            return True
        return await runtime.current().service("timers").delete(task_id)

    def _of_chat(self, chat_key: str) -> list[TimerTask]:
        return [timer for timer in self._own.values() if timer.chat_key == chat_key]

    def _clear(self, chat_key: str, temporary: bool | None) -> None:
        for timer in self._of_chat(chat_key):
            if temporary in (None, timer.temporary):
                self._drop(timer.task_id)

    def _drop(self, task_id: str) -> None:
        self._tasks[task_id].cancel()
        self._forget(task_id)

    def _forget(self, task_id: str) -> None:
        self._own.pop(task_id, None)
        self._tasks.pop(task_id, None)

    def _call_later(
        self,
        chat_key: str,
        trigger_time: int,
        event_desc: str,
        override: bool,
        callback: Callable[[], Awaitable[None]],
    ) -> bool:
        delay_seconds = trigger_time - time.time()
        if delay_seconds < 0:
            return False
        if override:
            self._clear(chat_key, temporary=True)
        timer = TimerTask(
            timer_id=secrets.token_hex(6),
            chat_key=chat_key,
            trigger_time=trigger_time,
            event_desc=event_desc,
            temporary=override,
        )

        async def run() -> None:
            await asyncio.sleep(delay_seconds)
            del self._own[timer.task_id]  # it has fired, so that nothing cancels its callback any more
            try:
                await run_callable(callback)
            except Exception as exc:  # plugin code at the end of its own task
                _log.opt(exception=exc).error("timer_callback_failed")

        self._own[timer.task_id] = timer
        task = self._tasks[timer.task_id] = asyncio.get_running_loop().create_task(run())
        task.add_done_callback(lambda _: self._forget(timer.task_id))
        return True


timer_service = TimerService()
