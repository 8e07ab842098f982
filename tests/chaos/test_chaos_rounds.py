"""Rounds under random kills: exactly one per trigger, in order per chat, never two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_probes import ROUND_FAULTS, ask
from worker_crew import Crew

from broker_config.settings import Settings
from nekro.app import use_cases
from nekro.app.services import Services
from nekro.cli.services.system import migrate
from storage.engine import Database

PLUGINS = Path(__file__).parent.parent / "system" / "plugins"
CHATS = int(os.environ.get("NEKRO_TEST_CHAOS_CHATS", "200"))
CALLS = 5
KILL_SECONDS = 1.0
#: With fewer running, none is killed.
LEAST_RUNNING = 3
#: Restarts of Redis, each of which loses all of its data.
RESTARTS = 2
#: A machine may take any time for the rounds, but not so long for the next one.
STALL_SECONDS = 300
LONGEST_SECONDS = 7200
#: So often in a row, no round is open before the wait for one ends.
QUIET_LOOKS = 60
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


@contextlib.asynccontextmanager
async def system(settings: Settings, directory: Path) -> AsyncIterator[tuple[Services, Crew]]:
    await migrate(settings)
    services = Services.load(settings, role="cli")
    workers = Crew(settings, directory, least_running=LEAST_RUNNING, forks=True)
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
        broker={
            "url": redis_url,
            "key_prefix": f"t{uuid.uuid4().hex}:",
            "visibility_timeout_seconds": 5,
            "max_deliveries": 1000,
        },
        database={"url": database_url},
        plugins={"dirs": (PLUGINS,)},
        security={"signing_key": "test-signing-key"},
        llm={"script": script},
        agent={"lease_seconds": 3, "rounds_per_turn": 100},
        sandbox={"max_concurrent": 2},
    )


async def ended_chats(database: Database) -> int:
    found = await ask(database, "SELECT DISTINCT chat_key FROM messages WHERE text = 'counted'")
    return len(found)


async def ended_rounds(database: Database) -> int:
    (found,) = await ask(database, "SELECT count(*) FROM rounds WHERE state NOT IN ('requested', 'running')")
    return int(found[0])


async def is_quiet(database: Database) -> bool:
    return not await ask(database, "SELECT 1 FROM rounds WHERE state IN ('requested', 'running') LIMIT 1")


async def answered(database: Database) -> None:
    """Wait until each chat has its last message; fails if one has not and no round is open any more."""
    quiet, rounds, moved_at = 0, 0, time.monotonic()
    while (ended := await ended_chats(database)) < CHATS:
        if (now := await ended_rounds(database)) > rounds:
            rounds, moved_at = now, time.monotonic()
        assert time.monotonic() - moved_at < STALL_SECONDS, f"no round has ended for {STALL_SECONDS} s"
        quiet = quiet + 1 if await is_quiet(database) else 0
        assert quiet < QUIET_LOOKS, f"{CHATS - ended} chats got no last message, and no round is open"
        await asyncio.sleep(0.5)


async def prove(database: Database) -> dict[str, Any]:
    """Check the ledger; returns its counts."""
    found = {fault: list(await ask(database, query)) for fault, query in ROUND_FAULTS.items()}
    assert not any(found.values()), {fault: items for fault, items in found.items() if items}
    counts = "SELECT 'rounds ' || state, count(*) FROM rounds GROUP BY state"
    figures = dict(await ask(database, counts))
    figures |= dict(await ask(database, "SELECT 'calls ' || state, count(*) FROM calls GROUP BY state"))
    (attempts, interrupted, said) = (
        "SELECT count(*) FROM rounds WHERE attempt > 1",
        "SELECT count(*) FROM rounds WHERE error LIKE 'The host that ran %'",
        "SELECT count(*) FROM messages WHERE text = 'counted'",
    )
    figures["rounds asked again"] = (await ask(database, attempts))[0][0]
    figures["rounds interrupted"] = (await ask(database, interrupted))[0][0]
    figures["messages at the end"] = (await ask(database, said))[0][0]
    return figures


async def kill_on_and_on(workers: Crew, rng: random.Random, kills: list[str], database: Database) -> None:
    """Kill one worker every second and start another without waiting for it.

    Where a start takes longer, so does the wait for the next kill, which also waits for the end of a round:
    workers that end none prove nothing, and the rounds end however slow the machine is.
    """
    pause = KILL_SECONDS

    async def replace(lane: str) -> None:
        nonlocal pause
        began = time.monotonic()
        await workers.start(lane)
        pause = max(KILL_SECONDS, time.monotonic() - began)

    async with asyncio.TaskGroup() as starts:
        while True:
            worker = workers.take(rng.random())
            if worker is not None:
                worker.kill()
                kills.append(worker.lane)
                starts.create_task(replace(worker.lane))
            before = await ended_rounds(database)
            await asyncio.sleep(pause)
            while await ended_rounds(database) == before:
                await asyncio.sleep(0.2)


async def restart_redis(server: Any, database: Database) -> None:
    """Restart Redis without its data as often as configured, while chats have rounds."""
    for number in range(1, RESTARTS + 1):
        while await ended_chats(database) < CHATS * number // (RESTARTS + 1):
            await asyncio.sleep(0.2)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_SECONDS)
@pytest.mark.parametrize("faults", ["workers", "redis", "both"])
async def test_every_trigger_gets_one_round_in_order_under_random_kills(
    own_redis: Any, postgres_server: Any, tmp_path: Path, faults: str, record_property: Callable[..., None]
) -> None:
    seed = int(os.environ.get("NEKRO_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    settings = settings_for(tmp_path, own_redis.url, postgres_server.create_database())
    async with system(settings, tmp_path) as (services, workers):
        begin, kills = time.monotonic(), list[str]()
        for number in range(CHATS):
            await use_cases.receive_message(
                services, f"chat/{number}", "please count", user_id="u", user_name="U"
            )
        work = []
        if faults in ("workers", "both"):
            killing = kill_on_and_on(workers, random.Random(seed), kills, services.database)
            work.append(asyncio.create_task(killing))
        restarts = asyncio.create_task(restart_redis(own_redis, services.database))
        if faults == "workers":
            restarts.cancel()
        try:
            await answered(services.database)
            await asyncio.gather(restarts, return_exceptions=True)
            for task in work:
                task.cancel()
            async with asyncio.timeout(STALL_SECONDS):
                while not await is_quiet(services.database):
                    await asyncio.sleep(0.1)
        finally:
            figures = {
                "faults": faults, "seed": seed, "chats": CHATS, "kills": len(kills),
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
