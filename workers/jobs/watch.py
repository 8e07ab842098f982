"""Calls ``on_terminal`` of ``task.start`` in the process that started the job, when the job ends."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from loguru import logger

from nekro.app.background import BackgroundLoop, Poll
from nekro.app.jobs import info_of
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.jobs import TaskCtl
from storage.engine import Database

__all__ = ["JobWatch"]


@dataclass(frozen=True, kw_only=True)
class _Watcher:
    callback: Callable[[Any], object]
    #: The loop on which the job was started; the callback runs there.
    loop: asyncio.AbstractEventLoop
    #: Of the code that started the job: what the callback causes is on the same account.
    context: contextvars.Context


class JobWatch:
    """Polls the jobs that this process started and that have a callback, until they end."""

    def __init__(self, database: Database, background: BackgroundLoop) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._watchers: dict[str, _Watcher] = {}
        self._poll = Poll(
            background,
            self._look,
            seconds=REFRESH_SECONDS,
            is_needed=lambda: bool(self._watchers),
            on_error="job_ends_not_seen",
        )

    def add(self, job_id: str, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with the job's last ``TaskCtl``, on the loop that is running now."""
        watcher = _Watcher(
            callback=callback, loop=asyncio.get_running_loop(), context=contextvars.copy_context()
        )
        with self._lock:
            self._watchers[job_id] = watcher
        self._poll.start()

    async def _look(self) -> None:
        with self._lock:
            watched = list(self._watchers)
        for job_id in watched:
            async with self._database.read() as transaction:
                job = await transaction.jobs.find(job_id)
            if job is not None and not job.state.is_final:
                continue
            with self._lock:
                watcher = self._watchers.pop(job_id)
            if job is not None:
                self._call_back(watcher, TaskCtl.of_job(info_of(job)))

    @staticmethod
    def _call_back(watcher: _Watcher, last: TaskCtl) -> None:
        with suppress(RuntimeError):  # the loop that started the job has ended
            watcher.loop.call_soon_threadsafe(_call, watcher.callback, last, context=watcher.context)


def _call(callback: Callable[[Any], object], last: TaskCtl) -> None:
    try:
        result = callback(last)
        if asyncio.iscoroutine(result):
            task = asyncio.ensure_future(result)
            _running.add(task)
            task.add_done_callback(_ended)
    except Exception:  # a plugin's code on a loop that must continue
        logger.exception("on_terminal_failed")


#: Callbacks that are coroutines; the loop keeps only weak references to tasks.
_running: set[asyncio.Future[Any]] = set()


def _ended(task: asyncio.Future[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.opt(exception=error).error("on_terminal_failed")
