"""Timers that call a function: they exist in the process that set them and end with their plugin.

They run on the loop of the plugins' hooks: the loops of lane ``long`` run only while there is a job. Workers
publish them, so that people see which worker owns them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import ReferenceType, ref

from nekro_agent.core.logger import get_sub_logger
from nekro_agent.execution.invoke import run_callable
from nekro_agent.execution.uses import plugin_in_use
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import CallbackTimer, TimerInfo

__all__ = ["add", "count_of", "drop", "drop_of", "listed", "run_here"]

_log = get_sub_logger("timer")


@dataclass(frozen=True, kw_only=True)
class _Own:
    timer: CallbackTimer
    plugin: NekroPlugin | None
    future: Future[None]


_own: dict[str, _Own] = {}
_home: ReferenceType[asyncio.AbstractEventLoop] | None = None


def run_here() -> None:
    """Let the callbacks of timers that are set from now on run on the running loop."""
    global _home
    _home = ref(asyncio.get_running_loop())


def add(timer: TimerInfo, callback: Callable[[], Awaitable[None]], *, delay_seconds: float) -> None:
    """Call ``callback`` after a time, unless the timer is dropped before."""
    plugin = plugin_in_use()

    async def run() -> None:
        await asyncio.sleep(delay_seconds)
        _own.pop(timer.id, None)  # it has fired, so that nothing cancels its callback any more
        try:
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
    _own[timer.id] = _Own(timer=own, plugin=plugin, future=future)
    future.add_done_callback(lambda _: _own.pop(timer.id, None))


def listed() -> list[CallbackTimer]:
    """Return the timers that have not fired, in the order of setting."""
    return [own.timer for own in list(_own.values())]


def drop(timer_id: str) -> bool:
    """Cancel a timer; False if it has fired or does not exist."""
    own = _own.pop(timer_id, None)
    if own is not None:
        own.future.cancel()
    return own is not None


def drop_of(plugin: NekroPlugin) -> None:
    """Cancel the timers that a plugin's code has set."""
    for timer_id, own in list(_own.items()):
        if own.plugin is plugin:
            drop(timer_id)


def count_of(plugin: NekroPlugin) -> int:
    """Return how many timers of a plugin have not fired."""
    return sum(own.plugin is plugin for own in list(_own.values()))


def _loop() -> asyncio.AbstractEventLoop:
    home = _home() if _home is not None else None
    return home if home is not None and home.is_running() else asyncio.get_running_loop()
