"""Injects faults into a `World` by a schedule, and repairs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from evidence import Span
from fault_plan import FaultKind, PlannedFault
from fault_world import World

#: Seconds between two checks for workers that ended by themselves.
WATCH_SECONDS = 0.5


class Nemesis:
    """Executes faults; those of different components overlap."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._redis, self._database = asyncio.Lock(), asyncio.Lock()
        self._faults: dict[FaultKind, Callable[[PlannedFault], Awaitable[bool | None]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.FREEZE: self._freeze,
            FaultKind.KILL_CALLER: self._kill_caller,
            FaultKind.KILL_SERVER: self._kill_server,
            FaultKind.CUT: self._cut,
            FaultKind.LOSE: self._lose,
            FaultKind.REDIS_FREEZE: self._redis_freeze,
            FaultKind.REDIS_RESTART: self._redis_restart,
            FaultKind.REDIS_ROLLBACK: self._redis_rollback,
            FaultKind.REDIS_EMPTY: self._redis_empty,
            FaultKind.DB_LOCK: self._db_lock,
            FaultKind.DB_AWAY: self._db_away,
            FaultKind.DB_CRASH: self._db_crash,
            FaultKind.DB_LOSE: self._db_lose,
        }

    async def run(self, schedule: Sequence[PlannedFault]) -> None:
        """Execute the schedule; returns when every component works again."""
        began = time.monotonic()
        watch = asyncio.create_task(self._watch())
        async with asyncio.TaskGroup() as faults:
            for fault in schedule:
                await asyncio.sleep(max(0, began + fault.at_seconds - time.monotonic()))
                faults.create_task(self._do(fault))
        watch.cancel()
        await asyncio.wait({watch})

    async def _do(self, fault: PlannedFault) -> None:
        lock = None
        if fault.kind.startswith("redis"):
            lock = self._redis
        elif fault.kind.startswith("db"):
            lock = self._database
        if lock is not None and lock.locked():
            return  # one at a time
        began, spans = time.time(), self._world.evidence.faults
        # Before the fault: its consequences may be visible before its end.
        planned = Span(kind=fault.kind, began=began, ended=began + fault.length_seconds)
        spans.append(planned)
        async with lock or contextlib.nullcontext():
            has_happened = await self._faults[fault.kind](fault)
        spans.remove(planned)
        if has_happened is not False:
            spans.append(Span(kind=fault.kind, began=began, ended=time.time()))

    async def _watch(self) -> None:
        """Replace workers that end by themselves, as `nekro up` does."""
        async with asyncio.TaskGroup() as starts:
            while True:
                for lane in self._world.crew.collect_deserters():
                    starts.create_task(self._world.crew.start(lane))
                await asyncio.sleep(WATCH_SECONDS)

    # Methods that return False found no target.

    async def _kill(self, fault: PlannedFault) -> bool:
        worker = self._world.crew.take(fault.choice)
        if worker is None:
            return False
        await asyncio.to_thread(worker.kill)
        await self._world.crew.start(worker.lane)
        return True

    async def _stop(self, fault: PlannedFault) -> bool:
        worker = self._world.crew.take(fault.choice)
        if worker is None:
            return False
        try:
            status = await asyncio.to_thread(worker.stop)
        except pytest.fail.Exception:  # killed by another fault meanwhile
            self._world.notice("worker-stop", worker.log.stem, "SIGTERM did not end it")
        else:
            if status:
                self._world.notice("worker-stop", worker.log.stem, f"SIGTERM ended it with status {status}")
        await self._world.crew.start(worker.lane)
        return True

    async def _freeze(self, fault: PlannedFault) -> bool:
        worker = self._world.crew.take(fault.choice)
        if worker is None:
            return False
        worker.freeze()
        await asyncio.sleep(fault.length_seconds)
        worker.thaw()
        self._world.crew.running.append(worker)
        return True

    async def _kill_caller(self, fault: PlannedFault) -> bool:
        callers = [caller for caller in self._world.callers if caller.process.poll() is None]
        if not callers:
            return False
        callers[int(fault.choice * len(callers))].kill()
        await self._world.replace_caller()
        return True

    async def _kill_server(self, _fault: PlannedFault) -> bool:
        processes = self._world.server_processes()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(processes)

    async def _cut(self, _fault: PlannedFault) -> None:
        self._world.relay.reset()

    async def _lose(self, fault: PlannedFault) -> None:
        self._world.relay.mute()
        await asyncio.sleep(fault.length_seconds)
        self._world.relay.reset()

    async def _redis_freeze(self, fault: PlannedFault) -> None:
        process = self._world.redis.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(fault.length_seconds)
        process.send_signal(signal.SIGCONT)

    async def _redis_restart(self, fault: PlannedFault) -> None:
        await asyncio.to_thread(self._world.redis.save_and_stop)
        await self._redis_back(fault.length_seconds)

    async def _redis_rollback(self, fault: PlannedFault) -> None:
        await asyncio.to_thread(self._world.redis.save)
        await asyncio.sleep(fault.length_seconds)
        await asyncio.to_thread(self._world.redis.kill)
        await self._redis_back(0)

    async def _redis_empty(self, fault: PlannedFault) -> None:
        await asyncio.to_thread(self._world.redis.kill)
        self._world.redis.forget()
        await self._redis_back(fault.length_seconds)

    async def _redis_back(self, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        await asyncio.to_thread(self._world.redis.start)

    async def _db_lock(self, fault: PlannedFault) -> None:
        path = str(self._world.fleet.settings.database.url).removeprefix("sqlite:///")
        await asyncio.to_thread(_lock, path, fault.length_seconds)

    async def _db_away(self, fault: PlannedFault) -> None:
        assert self._world.proxy is not None
        self._world.proxy.go_away()
        await asyncio.sleep(fault.length_seconds)
        self._world.proxy.come_back()

    async def _db_crash(self, fault: PlannedFault) -> None:
        assert self._world.postgres is not None
        await asyncio.to_thread(self._world.postgres.crash)
        await asyncio.sleep(fault.length_seconds)
        await asyncio.to_thread(self._world.postgres.start_again)

    async def _db_lose(self, fault: PlannedFault) -> None:
        assert self._world.proxy is not None
        self._world.proxy.is_deaf = True
        await asyncio.sleep(fault.length_seconds)
        self._world.proxy.cut()
        self._world.proxy.come_back()


def _lock(path: str, seconds: float) -> None:
    other = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        other.execute("ROLLBACK")
    finally:
        other.close()
