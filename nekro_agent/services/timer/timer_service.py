"""Timers as a service object, and those that call a function.

Timers with a callback exist in the process that set them and end with their plugin. They run on the loop of
the plugins' hooks: the loops of lane ``long`` run only while there is a job. Workers publish them, so that
people see which worker owns them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from weakref import ReferenceType, ref

from nekro_agent import runtime
from nekro_agent.api import timer as timers
from nekro_agent.api.timer import TimerTask
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.files import staging
from nekro_agent.plugin import NekroPlugin, plugin_in_use
from nekro_agent.ports import CallbackTimer, TimerInfo

__all__ = [
    "TimerService",
    "TimerTask",
    "callback_timers",
    "count_timers_of",
    "drop_timers_of",
    "run_callbacks_here",
    "timer_service",
]

_log = get_sub_logger("timer")


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
        return _drop(task_id) or await runtime.current().service("timers").delete(task_id)

    def _clear(self, chat_key: str, temporary: bool | None) -> None:
        for own in _of_chat(chat_key):
            if temporary in (None, own.temporary):
                _drop(own.id)

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
        _call_after(own, callback, delay_seconds=delay_seconds)
        return True


timer_service = TimerService()


@dataclass(frozen=True, kw_only=True)
class _PendingTimer:
    timer: CallbackTimer
    plugin: NekroPlugin | None
    future: Future[None]


_timers: dict[str, _PendingTimer] = {}
_loop_of_hooks: ReferenceType[asyncio.AbstractEventLoop] | None = None


def run_callbacks_here() -> None:
    """Let the callbacks of timers that are set from now on run on the running loop."""
    global _loop_of_hooks
    _loop_of_hooks = ref(asyncio.get_running_loop())


def _call_after(timer: TimerInfo, callback: Callable[[], Awaitable[None]], *, delay_seconds: float) -> None:
    """Call ``callback`` after a time, unless the timer is dropped before."""
    plugin = plugin_in_use()

    async def run() -> None:
        await asyncio.sleep(delay_seconds)
        _timers.pop(timer.id, None)  # it has fired, so that nothing cancels its callback any more
        try:
            key = plugin.key if plugin else None
            async with staging.call_scope("timer callback", chat_key=timer.chat_key, plugin_key=key):
                await run_callable(callback)
        except Exception as exc:  # plugin code at the end of its own task
            _log.opt(exception=exc).error("timer_callback_failed")

    own = CallbackTimer(
        id=timer.id,
        chat_key=timer.chat_key,
        fire_at=timer.fire_at,
        description=timer.description,
        temporary=timer.temporary,
        plugin_key="" if plugin is None else plugin.key,
    )
    future = asyncio.run_coroutine_threadsafe(run(), _loop())
    _timers[timer.id] = _PendingTimer(timer=own, plugin=plugin, future=future)
    future.add_done_callback(lambda _: _timers.pop(timer.id, None))


def callback_timers() -> list[CallbackTimer]:
    """Return the timers that have not fired, in the order of setting."""
    return [own.timer for own in list(_timers.values())]


def _drop(timer_id: str) -> bool:
    """Cancel a timer; False if it has fired or does not exist."""
    own = _timers.pop(timer_id, None)
    if own is not None:
        own.future.cancel()
    return own is not None


def drop_timers_of(plugin: NekroPlugin) -> None:
    """Cancel the timers that a plugin's code has set."""
    for timer_id, own in list(_timers.items()):
        if own.plugin is plugin:
            _drop(timer_id)


def count_timers_of(plugin: NekroPlugin) -> int:
    """Return how many timers of a plugin have not fired."""
    return sum(own.plugin is plugin for own in list(_timers.values()))


def _loop() -> asyncio.AbstractEventLoop:
    home = _loop_of_hooks() if _loop_of_hooks is not None else None
    return home if home is not None and home.is_running() else asyncio.get_running_loop()


def _of_chat(chat_key: str) -> list[CallbackTimer]:
    return [own for own in callback_timers() if own.chat_key == chat_key]
