"""One-time timers: trigger a chat's agent at a time, with a description of the reason."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, overload

from nekro_agent import runtime
from nekro_agent.api.message import checked_chat
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution import greenlets as bridge
from nekro_agent.ports import TimerInfo

__all__ = ["TimerList", "TimerTask", "clear_timers", "get_timers", "set_temp_timer", "set_timer"]

_FARTHEST: Final = timedelta(days=3653)
_log = get_sub_logger("timer")


@dataclass(frozen=True, kw_only=True)
class TimerTask:
    """A timer that has not fired yet."""

    timer_id: str
    chat_key: str
    #: Seconds since the epoch.
    trigger_time: int
    event_desc: str
    temporary: bool

    @property
    def task_id(self) -> str:
        """Like ``timer_id``, under the name that Nekro Agent has."""
        return self.timer_id

    @classmethod
    def of(cls, timer: TimerInfo) -> TimerTask:
        """Build it from the port's value."""
        return cls(
            timer_id=timer.id,
            chat_key=timer.chat_key,
            trigger_time=int(timer.fire_at.timestamp()),
            event_desc=timer.description,
            temporary=timer.temporary,
        )


async def set_timer(chat_key: str, trigger_time: int, event_desc: str) -> bool:
    """Set a timer; it survives restarts.

    Args:
        trigger_time: seconds since the epoch; 0 triggers the agent now, a negative number clears
            the chat's timers.

    Returns:
        False, with a warning in the log, if the time is past, not an integer, or over ten years away.
    """
    return await _set(chat_key, trigger_time, event_desc, temporary=False)


async def set_temp_timer(chat_key: str, trigger_time: int, event_desc: str) -> bool:
    """Set the chat's only temporary timer, replacing the old one; see :func:`set_timer`."""
    return await _set(chat_key, trigger_time, event_desc, temporary=True)


async def clear_timers(chat_key: str, temporary: bool | None = None) -> bool:
    """Cancel the chat's timers: all, or only the (non-)temporary ones."""
    await runtime.current().service("timers").clear(checked_chat(chat_key), temporary=temporary)
    return True


class TimerList(Sequence[TimerTask]):
    """A chat's timers, soonest first: a list when awaited, and usable as a sequence without ``await``.

    The reference's function is synchronous, so plugins use its result directly; this implementation
    must query the database.
    """

    def __init__(self, chat_key: str, others: Sequence[TimerTask] = ()) -> None:
        """List the chat's timers in the database, then ``others``."""
        self._chat_key = chat_key
        self._others = others
        self._tasks: list[TimerTask] | None = None

    def __await__(self) -> Generator[Any, Any, list[TimerTask]]:
        return self._load().__await__()

    @overload
    def __getitem__(self, index: int) -> TimerTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[TimerTask]: ...
    def __getitem__(self, index: int | slice) -> TimerTask | list[TimerTask]:
        return self._loaded()[index]

    def __len__(self) -> int:
        return len(self._loaded())

    def __repr__(self) -> str:
        return repr(self._tasks) if self._tasks is not None else f"<timers of {self._chat_key}, not read yet>"

    async def _load(self) -> list[TimerTask]:
        pending = await runtime.current().service("timers").pending(checked_chat(self._chat_key))
        self._tasks = [*map(TimerTask.of, pending), *self._others]
        return list(self._tasks)

    def _loaded(self) -> list[TimerTask]:
        if self._tasks is not None:
            return self._tasks
        if not bridge.can_wait():
            raise InvalidValueError(
                "get_timers: this code runs in a thread or task of its own; write `await get_timers(…)` there"
            )
        return bridge.wait(self._load())


def get_timers(chat_key: str) -> TimerList:
    """Return the chat's timers, soonest first; ``await`` the result, or use it directly in a method."""
    return TimerList(chat_key)


async def _set(chat_key: str, trigger_time: object, event_desc: str, *, temporary: bool) -> bool:
    if isinstance(trigger_time, bool) or not isinstance(trigger_time, int):
        return _refused(chat_key, f"trigger_time must be an integer, not {type(trigger_time).__name__}")
    if trigger_time < 0:
        return await clear_timers(chat_key, temporary=True if temporary else None)
    if trigger_time == 0:
        await runtime.current().messages.wake(checked_chat(chat_key))
        return True
    now = datetime.now(UTC)
    if trigger_time <= now.timestamp():
        return _refused(chat_key, f"trigger_time {trigger_time} is past")
    if trigger_time > (now + _FARTHEST).timestamp():
        return _refused(chat_key, f"trigger_time {trigger_time} is more than ten years away")
    fire_at = datetime.fromtimestamp(trigger_time, UTC)
    timers = runtime.current().service("timers")
    checked_chat(chat_key)
    await timers.add(chat_key, fire_at=fire_at, description=str(event_desc), temporary=temporary)
    return True


def _refused(chat_key: str, reason: str) -> bool:
    _log.bind(chat_key=chat_key, reason=reason).warning("timer_not_set")
    return False
