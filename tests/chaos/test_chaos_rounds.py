"""Rounds under random kills: exactly one per trigger, in order per chat, never two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from worker_fleet import Worker

from broker_config.settings import Settings
from cli.environment import environment_of
from cli.system import migrate
from storage.engine import Database
from workers.composition import Services

PLUGINS = Path(__file__).parent.parent / "system" / "plugins"
CHATS = int(os.environ.get("NEKRO_TEST_CHAOS_CHATS", "200"))
CALLS = 5
KILL_SECONDS = 1.0
#: Fewer are not killed: a busy machine may need longer than a second to start one.
LEAST_RUNNING = 3
#: Restarts of Redis, which then has lost everything.
RESTARTS = 2
DONE_SECONDS = 1500
LANES = ("methods",) * 3 + ("rounds",) * 3

SCRIPT = "\n".join(
    f"""
- when: "{trigger}"
  answer: |
    ```python
    count_up({number})
    ```"""
    for number, trigger in enumerate(["please count", *(f"'next': {n}}}" for n in range(1, CALLS))])
)
SCRIPT += f"""
- when: "'next': {CALLS}}}"
  answer: |
    ```python
    send_msg_text(_ck, "counted")
    ```
# Whatever went wrong (a worker died inside the call, a limit): make the last call once more.
- when: '(?s).*count_up\\((\\d+)\\)'
  anywhere: true
  answer: |
    ```python
    count_up(${{1}})
    ```
"""


class Workers:
    """Worker processes that are replaced when they die."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._running: list[Worker] = []
        self._starting: dict[Worker, asyncio.Task[str]] = {}
        self._started = 0
        self.kills = 0

    async def start(self, lane: str) -> None:
        """Start one worker; returns when it consumes."""
        self._started += 1
        log = self._directory / f"{lane}-{self._started}.log"
        environment = environment_of(self._settings)
        worker = Worker(self._settings, log, lane=lane, concurrency=None, environment=environment)
        self._starting[worker] = task = asyncio.create_task(asyncio.to_thread(worker.wait_ready))
        await task
        del self._starting[worker]
        self._running.append(worker)

    def kill_one(self, rng: random.Random) -> Worker | None:
        """SIGKILL a random worker; None while the others have not replaced those that died before."""
        if len(self._running) < LEAST_RUNNING:
            return None
        worker = self._running.pop(rng.randrange(len(self._running)))
        worker.kill()
        self.kills += 1
        return worker

    async def stop(self) -> None:
        """Stop all that run."""
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for worker in (*self._running, *self._starting):
            worker.process.terminate()
        for worker in (*self._running, *self._starting):
            await asyncio.to_thread(worker.stop)


@contextlib.asynccontextmanager
async def system(settings: Settings, directory: Path) -> AsyncIterator[tuple[Services, Workers]]:
    await migrate(settings)
    services, workers = Services.load(settings, role="cli"), Workers(settings, directory)
    await services.start()
    try:
        await asyncio.gather(*(workers.start(lane) for lane in LANES))
        yield services, workers
    finally:
        await workers.stop()
        await services.close()


def settings_for(tmp_path: Path, redis_url: str, database_url: str) -> Settings:
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT)
    return Settings.load(
        env_file=None,
        data_dir=tmp_path / "data",
        broker={"url": redis_url, "key_prefix": f"t{uuid.uuid4().hex}:", "visibility_timeout_seconds": 5},
        database={"url": database_url},
        plugins={"dirs": (PLUGINS,)},
        security={"signing_key": "test-signing-key"},
        llm={"script": script},
        # These workers do not die of their rounds: a round that is started for the fourth time is no danger.
        agent={"lease_seconds": 3, "sweep_seconds": 1, "rounds_per_turn": 100, "max_attempts": 1000},
        sandbox={"max_concurrent": 2},
    )


async def rows(database: Database, query: str) -> Sequence[Any]:
    async with database.read() as transaction:
        return (await transaction.connection.execute(text(query))).all()


async def ended_chats(database: Database) -> int:
    found = await rows(database, "SELECT DISTINCT chat_key FROM messages WHERE text = 'counted'")
    return len(found)


async def is_quiet(database: Database) -> bool:
    return not await rows(database, "SELECT 1 FROM rounds WHERE state IN ('requested', 'running') LIMIT 1")


#: Each finds what must not be, by what it would be.
FAULTS = {
    "two rounds of one trigger": """
        SELECT trigger_kind, trigger_id FROM rounds GROUP BY 1, 2 HAVING count(*) > 1""",
    "a message of a person without a round": """
        SELECT m.id FROM messages m LEFT JOIN rounds r ON r.trigger_kind = 'message' AND r.trigger_id = m.id
        WHERE m.kind = 'user' AND r.id IS NULL""",
    "an AGENT result without a round": """
        SELECT c.id FROM calls c LEFT JOIN rounds r ON r.trigger_kind = 'call' AND r.trigger_id = c.id
        WHERE c.type = 'agent' AND c.state = 'done' AND r.id IS NULL""",
    "a round of a call that left no result": """
        SELECT r.id FROM rounds r LEFT JOIN calls c ON c.id = r.trigger_id AND c.state = 'done'
        WHERE r.trigger_kind = 'call' AND c.id IS NULL""",
    "a round that is not over": "SELECT id, state, error FROM rounds WHERE state NOT IN ('done', 'merged')",
    "a trigger that went along with nothing": """
        SELECT r.id FROM rounds r LEFT JOIN rounds into_ ON into_.id = r.merged_into AND into_.state = 'done'
        WHERE r.state = 'merged' AND into_.id IS NULL""",
    # A later round of a chat began before an earlier one had ended: out of order, or two at once.
    "two rounds of a chat at once or out of order": """
        SELECT a.id, b.id FROM rounds a JOIN rounds b ON a.chat_key = b.chat_key AND a.sequence < b.sequence
        WHERE a.state = 'done' AND b.state = 'done' AND b.started_at < a.finished_at""",
}


async def prove(database: Database) -> dict[str, Any]:
    """Check the ledger; returns what it counts."""
    found = {fault: list(await rows(database, query)) for fault, query in FAULTS.items()}
    assert not any(found.values()), {fault: items for fault, items in found.items() if items}
    counts = "SELECT 'rounds ' || state, count(*) FROM rounds GROUP BY state"
    figures = dict(await rows(database, counts))
    figures |= dict(await rows(database, "SELECT 'calls ' || state, count(*) FROM calls GROUP BY state"))
    (attempts, interrupted, said) = (
        "SELECT count(*) FROM rounds WHERE attempt > 1",
        "SELECT count(*) FROM rounds WHERE error LIKE 'The host that ran %'",
        "SELECT count(*) FROM messages WHERE text = 'counted'",
    )
    figures["rounds asked again"] = (await rows(database, attempts))[0][0]
    figures["rounds interrupted"] = (await rows(database, interrupted))[0][0]
    figures["messages at the end"] = (await rows(database, said))[0][0]
    return figures


async def kill_on_and_on(workers: Workers, rng: random.Random) -> None:
    """Kill one every second, and start another; without waiting for it."""
    async with asyncio.TaskGroup() as starts:
        while True:
            killed = workers.kill_one(rng)
            if killed is not None:
                starts.create_task(workers.start(killed.lane))
            await asyncio.sleep(KILL_SECONDS)


async def restart_redis(server: Any, database: Database) -> None:
    """Restart it, without what it held, as often as is asked for, while chats are under way."""
    for number in range(1, RESTARTS + 1):
        while await ended_chats(database) < CHATS * number // (RESTARTS + 1):
            await asyncio.sleep(0.2)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


@pytest.mark.slow
@pytest.mark.timeout(DONE_SECONDS + 120)
@pytest.mark.parametrize("faults", ["workers", "redis", "both"])
async def test_every_trigger_gets_one_round_in_order_whatever_dies(
    own_redis: Any, postgres_server: Any, tmp_path: Path, faults: str, record_property: Callable[..., None]
) -> None:
    seed = int(os.environ.get("NEKRO_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    settings = settings_for(tmp_path, own_redis.url, postgres_server.create_database())
    async with system(settings, tmp_path) as (services, workers):
        begin = time.monotonic()
        for number in range(CHATS):
            await services.receive_message(f"chat/{number}", "please count", user_id="u", user_name="U")
        work = []
        if faults in ("workers", "both"):
            work.append(asyncio.create_task(kill_on_and_on(workers, random.Random(seed))))
        restarts = asyncio.create_task(restart_redis(own_redis, services.database))
        if faults == "workers":
            restarts.cancel()
        try:
            async with asyncio.timeout(DONE_SECONDS):
                while await ended_chats(services.database) < CHATS:
                    await asyncio.sleep(0.5)
                await asyncio.gather(restarts, return_exceptions=True)
                for task in work:
                    task.cancel()
                while not await is_quiet(services.database):
                    await asyncio.sleep(0.1)
        finally:
            figures = {
                "faults": faults, "seed": seed, "chats": CHATS, "kills": workers.kills,
                "seconds": round(time.monotonic() - begin, 1), "ended": await ended_chats(services.database),
            }  # fmt: skip
            for task in (*work, restarts):
                task.cancel()
            await asyncio.gather(*work, restarts, return_exceptions=True)
            print(figures)
        figures |= await prove(services.database)
    print(figures)
    for name, value in figures.items():
        record_property(name, value)
