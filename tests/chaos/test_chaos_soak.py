"""Scenario 37: mixed load under seeded random faults; every call is accounted for at the end."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_world import LEASE_SECONDS, Account, call, client_of, key, opened, rows, times, until_quiet
from waiting import eventually
from worker_fleet import Fleet, Worker

from nekro.app import use_cases

SECONDS = float(os.environ.get("NEKRO_TEST_SOAK_SECONDS", "60"))
CLIENTS = 30
LANES = ("methods", "methods", "methods", "rounds", "rounds")
METHODS = {"T": "work", "E": "effect", "A": "wake"}
SCRIPT = """
- when: '(?s).*please do (R\\w+)'
  anywhere: true
  answer: |
    ```python
    work("${1}")
    effect("${1}")
    ```
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 400)]


class Soak:
    """A fleet, its load and its faults."""

    def __init__(self, fleet: Fleet, redis_server: Any, rng: random.Random) -> None:
        self.fleet, self.redis, self.rng = fleet, redis_server, rng
        self.account = Account()
        self.faults: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.sent = 0
        self.messages = 0
        self._names = itertools.count()
        self.is_over = False

    async def start(self) -> None:
        """Start the workers."""
        self.workers = await asyncio.to_thread(self.fleet.start, *LANES, concurrency=20)

    async def client(self, services: Any) -> None:
        """Call methods in a loop."""
        while not self.is_over:
            kind = self.rng.choice("TTEEA")
            name = f"{kind}{next(self._names)}"
            seconds = self.rng.choice((0, 0, 0.01, 0.1, 0.5, 3))
            self.sent += 1
            outcome = call(
                services, METHODS[kind], name, seconds, chat_key=f"chat{self.rng.randrange(20)}", seconds=60
            )
            await self.account.follow(name, outcome)
            await asyncio.sleep(0.05)

    async def people(self, services: Any) -> None:
        """Write messages into chats, whose rounds call methods from a sandbox."""
        while not self.is_over:
            chat_key = f"people{self.messages % 10}"
            await use_cases.receive_message(
                services, chat_key, f"please do R{self.messages}", user_id="u", user_name="U"
            )
            self.messages += 1
            await asyncio.sleep(2)

    async def break_things(self) -> None:
        """Inject faults in a loop until the time is over."""
        end = time.monotonic() + SECONDS
        faults = (self.kill, self.kill, self.stop, self.freeze, self.cut, self.restart_redis)
        while time.monotonic() < end:
            fault = self.rng.choice(faults)
            self.faults[fault.__name__] += 1
            await fault()
            await asyncio.sleep(self.rng.uniform(0.5, 2.5))
        self.is_over = True

    async def kill(self) -> None:
        """SIGKILL a worker and start a replacement."""
        index = self.rng.randrange(len(self.workers))
        await asyncio.to_thread(self.workers[index].kill)
        await self._replace(index)

    async def stop(self) -> None:
        """SIGTERM a worker and start a replacement."""
        index = self.rng.randrange(len(self.workers))
        await asyncio.to_thread(self.workers[index].stop)
        await self._replace(index)

    async def freeze(self) -> None:
        """SIGSTOP a worker for longer than its leases, then SIGCONT."""
        worker = self.rng.choice(self.workers)
        worker.freeze()
        await asyncio.sleep(LEASE_SECONDS * 1.4)
        worker.thaw()

    async def cut(self) -> None:
        """Cut every connection to Redis."""
        with client_of(self.fleet) as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)

    async def restart_redis(self) -> None:
        """SIGKILL Redis; its data is on disk."""
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(self.rng.uniform(0, 2))
        await asyncio.to_thread(self.redis.start)

    async def _replace(self, index: int) -> None:
        (self.workers[index],) = await asyncio.to_thread(self.fleet.start, LANES[index], concurrency=20)

    def figures(self) -> dict[str, int]:
        """Figures that must not grow: keys beside the results, memory of the workers."""
        with client_of(self.fleet) as client:
            keys = [name for name in client.keys(key(self.fleet, "*")) if b"celery-task-meta" not in name]
        resident = [
            int(line.split()[1])
            for worker in self.workers
            for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
            if line.startswith("VmRSS")
        ]
        return {"keys": len(keys), "most_memory_kb": max(resident)}


async def test_37_mixed_faults_lose_no_call_and_double_no_effect(
    make_chaos: Callable[..., Fleet], own_redis: Any, tmp_path: Path
) -> None:
    seed = int(os.environ.get("NEKRO_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT)
    fleet = make_chaos(
        "postgres",
        append_only=True,
        broker={"max_deliveries": 100},
        llm={"script": script},
        agent={"rounds_per_turn": 50},
        workers={"drain_seconds": 8},
    )
    soak = Soak(fleet, own_redis, random.Random(seed))
    await soak.start()
    async with opened(fleet) as services:
        await asyncio.gather(
            soak.break_things(), soak.people(services), *(soak.client(services) for _ in range(CLIENTS))
        )
        middle = soak.figures()
        calm_at = time.monotonic()
        for lane in ("methods", "rounds"):
            await until_quiet(fleet, lane, seconds=90, what=f"lane {lane} to be empty")
        await eventually(lambda: no_open_rows(services), seconds=90, what="every row to end")
        calm = time.monotonic() - calm_at
        doubled, missing = await soak.account.doubled_and_missing(services, fleet)
        states = await rows(services, "SELECT type, state, count(*) FROM calls GROUP BY 1, 2 ORDER BY 1, 2")
        rounds = await rows(services, "SELECT state, count(*) FROM rounds GROUP BY state")
        twins = await rows(
            services, "SELECT 1 FROM rounds GROUP BY trigger_kind, trigger_id HAVING count(*) > 1"
        )
        unheard = await rows(
            services,
            "SELECT m.id FROM messages m LEFT JOIN rounds r ON r.trigger_id = m.id "
            "WHERE m.kind = 'user' AND r.id IS NULL",
        )
    account = soak.account
    slowest = sorted(account.seconds.values())
    print(
        f"seed={seed} seconds={SECONDS:g} faults={dict(soak.faults)} calls={soak.sent} "
        f"messages={soak.messages}\n"
        f"ok={len(account.ok)} unknown={len(account.unknown)} "
        f"errors={dict(account.error_kinds)} "
        f"doubled={len(doubled)} missing={len(missing)}\n"
        f"median {slowest[len(slowest) // 2]:.2f} s, p99 {slowest[int(len(slowest) * 0.99)]:.1f} s, "
        f"slowest {slowest[-1]:.1f} s; calm after {calm:.1f} s\n"
        f"tools twice={sum(n > 1 for name, n in times(fleet, 'start').items() if name[0] == 'T')} "
        f"rows={[tuple(row) for row in states]} rounds={[tuple(row) for row in rounds]}\n"
        f"figures at the end {middle}, calm {soak.figures()}"
    )
    assert set(account.error_kinds) <= {"BrokerUnavailableError"}, account.errors
    assert (doubled, missing, account.wild, twins, unheard) == ([], [], {}, [], [])
    assert account.count == soak.sent
    assert soak.figures()["keys"] < 40


async def no_open_rows(services: Any) -> bool:
    """Whether every call and every round has ended."""
    open_ = await rows(
        services,
        "SELECT id FROM calls WHERE state IN ('queued', 'running') "
        "UNION ALL SELECT id FROM rounds WHERE state IN ('requested', 'running')",
    )
    return not open_
