"""Timers as a service object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from nekro_agent import runtime
from nekro_agent.api import timer as timers
from nekro_agent.api.timer import TimerTask
from nekro_agent.execution import callback_timers
from nekro_agent.ports import CallbackTimer, TimerInfo

__all__ = ["TimerService", "TimerTask", "timer_service"]


class TimerService:
    """``timer_service`` of the reference.

    A timer with a callback exists in this process only; here it is listed and deleted like the others.
    """

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
            callback: called in this process instead of triggering the agent. Unlike the chat's timers it
                ends with the process, or when the plugin is disabled. Set it in ``on_enabled``, which runs
                again where the plugin is taken over.
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
        return timers.TimerList(chat_key, [TimerTask.of(own) for own in _of_chat(chat_key)])

    async def delete_timer_by_id(self, task_id: str) -> bool:
        """Cancel the timer with this ``task_id``; False if it has fired or does not exist."""
        return callback_timers.drop(task_id) or await runtime.current().service("timers").delete(task_id)

    def _clear(self, chat_key: str, temporary: bool | None) -> None:
        for own in _of_chat(chat_key):
            if temporary in (None, own.temporary):
                callback_timers.drop(own.id)

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
        own = TimerInfo(
            id=secrets.token_hex(6),
            chat_key=chat_key,
            fire_at=datetime.fromtimestamp(trigger_time, UTC),
            description=event_desc,
            temporary=override,
        )
        callback_timers.add(own, callback, delay_seconds=delay_seconds)
        return True


def _of_chat(chat_key: str) -> list[CallbackTimer]:
    return [own for own in callback_timers.listed() if own.chat_key == chat_key]


timer_service = TimerService()
