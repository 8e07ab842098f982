"""The timers of chats: lists and changes of operators, and the effects of a firing.

Operators change one-time and recurring timers, which are rows. Timers with callbacks are in the memory of a
worker, which owns them; they are listed only."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message, request_round
from nekro_agent import cron
from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.ports import CronJob, MessageKind
from storage.repositories.messages import NewMessage
from storage.repositories.rounds import RoundRequest
from storage.repositories.timers import RecordedTimer, WorkerTimer
from storage.states import TriggerKind
from storage.timer_services import Firing
from storage.transaction import Transaction

__all__ = [
    "Timer",
    "TimerChange",
    "TimerFirings",
    "change_timer",
    "id_of",
    "timers_after",
    "timers_of",
]


Timer = RecordedTimer | CronJob | WorkerTimer


class TimerChange(StrEnum):
    """What to do with a timer."""

    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"


async def timers_after(
    transaction: Transaction, chat_key: str | None, *, beginning: str = "", after: str = "", limit: int
) -> list[Timer]:
    """List the timers that have not ended, of a chat or of all, by id.

    Args:
        beginning: only timers whose ids begin with it.
        after: only timers after the one with this id; "" begins with the first.
    """
    ids = await transaction.timers.open_ids(chat_key, beginning=beginning, after=after, limit=limit)
    found = await timers_of(transaction, ids)
    return [found[timer_id] for timer_id in ids if timer_id in found]


async def timers_of(transaction: Transaction, ids: Collection[str]) -> dict[str, Timer]:
    """Return those of some ids whose timers have not ended."""
    found: list[Timer] = [
        *await transaction.timers.open_of(ids),
        *await transaction.cron_jobs.of(ids),
        *await transaction.timers.with_callback(ids),
    ]
    return {id_of(timer): timer for timer in found}


async def change_timer(transaction: Transaction, timer: Timer, change: TimerChange) -> Timer:
    """Change a timer; returns its new state, or its last one if it was deleted.

    Raises:
        NotFoundError: it has fired or was deleted meanwhile.
        ConflictError: it has a callback, so only its plugin can change it.
    """
    if isinstance(timer, WorkerTimer):
        raise ConflictError(
            f"timer {timer.id} calls a function of plugin {timer.plugin_key or 'unknown'} in the memory of "
            f"worker {timer.worker}; only the plugin can change it, and disabling the plugin deletes it"
        )
    if isinstance(timer, CronJob):
        return await _change_recurring(transaction, timer, change)
    return await _change_once(transaction, timer, change)


def id_of(timer: Timer) -> str:
    """Return the id of a timer."""
    return timer.job_id if isinstance(timer, CronJob) else timer.id


async def _change_once(transaction: Transaction, timer: RecordedTimer, change: TimerChange) -> RecordedTimer:
    if change is TimerChange.DELETE:
        changed = await transaction.timers.delete(timer.id)
    else:
        changed = await transaction.timers.set_paused(timer.id, change is TimerChange.PAUSE)
    if not changed:
        raise NotFoundError(f"timer {timer.id} has fired meanwhile")
    return timer if change is TimerChange.DELETE else await transaction.timers.get_open(timer.id)


async def _change_recurring(transaction: Transaction, job: CronJob, change: TimerChange) -> CronJob:
    if change is TimerChange.DELETE:
        changed, new = await transaction.cron_jobs.delete(job.job_id), job
    elif (change is TimerChange.PAUSE) == (job.next_fire_at is None):
        return job
    else:
        new = cron.scheduled(job, paused=change is TimerChange.PAUSE)
        changed = await transaction.cron_jobs.replace(new)
    if not changed:
        raise NotFoundError(f"timer {job.job_id} was deleted meanwhile")
    return new


class TimerFirings:
    """The effects of a firing: a system message with its description, and a round."""

    def __init__(self, publisher: EventPublisher, *, debounce_seconds: float = 0) -> None:
        self._publisher = publisher
        self._debounce_seconds = debounce_seconds

    async def fire(self, transaction: Transaction, firing: Firing) -> None:
        """Record both in the transaction that takes the firing; publish after its commit."""
        message = NewMessage(
            chat_key=firing.chat_key,
            kind=MessageKind.SYSTEM,
            text=firing.text,
            once_key=f"timer:{firing.id}",
        )
        row = await append_message(transaction, self._publisher, message)
        request = RoundRequest(
            chat_key=firing.chat_key,
            trigger_kind=TriggerKind.TIMER,
            trigger_id=firing.id,
            delay_seconds=self._debounce_seconds,
        )
        await request_round(transaction, self._publisher, request, account_id=firing.account_id, message=row)
