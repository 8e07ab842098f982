"""Rounds under random kills: exactly one per trigger, in order per chat, never two at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from broker_config.settings import Settings
from cli.environment import environment_of
from cli.process import ChildProcess, worker_spec
from cli.system import migrate
from storage.engine import Database
from workers.composition import Services

PLUGINS = Path(__file__).parent.parent / "system" / "plugins"
CHATS = int(os.environ.get("NEKRO_TEST_CHAOS_CHATS", "200"))
CALLS = 5
KILL_SECONDS = 1.0
#: Redis restarts in the second test.
RESTARTS = 2
DONE_SECONDS = 600
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
        self._environment = environment_of(settings)
        self._log = (directory / "workers.log").open("a", encoding="utf-8")
        self._running: dict[str, ChildProcess] = {}
        self._started = 0
        self.kills = 0

    async def start(self, lane: str) -> None:
        """Start one worker and wait until it consumes."""
        self._started += 1
        name = f"{lane}-{self._started}"
        child = await ChildProcess.start(
            worker_spec(lane, name=name),
            environment=self._environment,
            directory=None,
            sink=lambda line: print(name, line, file=self._log),
        )
        self._running[name] = child
        await child.ready()

    async def kill_one(self, rng: random.Random) -> None:
        """SIGKILL a random worker and start another one in its lane."""
        name = rng.choice(sorted(self._running))
        child = self._running.pop(name)
        child.signal(signal.SIGKILL)
        await child.stop(warm_seconds=0)
        self.kills += 1
        await self.start(child.spec.lane)

    async def stop(self) -> None:
        """Stop all that run."""
        await asyncio.gather(*(child.stop(warm_seconds=15) for child in self._running.values()))
        self._log.close()


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
        agent={"lease_seconds": 3, "sweep_seconds": 1, "rounds_per_turn": 100},
        sandbox={"max_concurrent": 2},
    )


async def rows(database: Database, query: str) -> Sequence[Any]:
    async with database.read() as transaction:
        return (await transaction.connection.execute(text(query))).all()


async def ended_chats(database: Database) -> int:
    return len(await rows(database, "SELECT chat_key FROM messages WHERE kind = 'assistant'"))


async def prove(database: Database) -> dict[str, int]:
    """Check the ledger; returns its counts."""
    doubled = await rows(
        database, "SELECT trigger_kind, trigger_id FROM rounds GROUP BY 1, 2 HAVING count(*) > 1"
    )
    overlapping = await rows(
        database,
        """
        SELECT a.id, b.id FROM rounds a JOIN rounds b
        ON a.chat_key = b.chat_key AND a.sequence < b.sequence
        WHERE a.state = 'done' AND b.state = 'done' AND b.started_at < a.finished_at
        """,
    )
    open_ = await rows(database, "SELECT id FROM rounds WHERE state IN ('requested', 'running')")
    # Each AGENT call that ended well woke exactly one round, and no call did so twice.
    unanswered = await rows(
        database,
        """
        SELECT c.id FROM calls c LEFT JOIN rounds r ON r.trigger_kind = 'call' AND r.trigger_id = c.id
        WHERE c.type = 'agent' AND c.state = 'done' AND r.id IS NULL
        """,
    )
    assert (doubled, overlapping, open_, unanswered) == ([], [], [], [])
    states = dict(await rows(database, "SELECT state, count(*) FROM rounds GROUP BY state"))
    return {str(state): int(count) for state, count in states.items()}


@pytest.mark.slow
@pytest.mark.timeout(DONE_SECONDS + 120)
@pytest.mark.parametrize("faults", ["workers", "redis"])
async def test_every_trigger_gets_one_round_in_order_whatever_dies(
    own_redis: Any, postgres_server: Any, tmp_path: Path, faults: str, record_property: Callable[..., None]
) -> None:
    seed = int(os.environ.get("NEKRO_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    settings = settings_for(tmp_path, own_redis.url, postgres_server.create_database())
    async with system(settings, tmp_path) as (services, workers):
        chats = [f"chat/{number}" for number in range(CHATS)]
        for chat_key in chats:
            await services.receive_message(chat_key, "please count", user_id="u", user_name="U")
        restarts_at = [CHATS // 3, 2 * CHATS // 3][:RESTARTS] if faults == "redis" else []
        async with asyncio.timeout(DONE_SECONDS):
            while (ended := await ended_chats(services.database)) < CHATS:
                if faults == "workers":
                    await workers.kill_one(rng)
                if restarts_at and ended >= restarts_at[0]:
                    restarts_at.pop(0)
                    await asyncio.to_thread(own_redis.kill)
                    await asyncio.to_thread(own_redis.start)
                await asyncio.sleep(KILL_SECONDS)
            while await rows(
                services.database, "SELECT 1 FROM rounds WHERE state IN ('requested','running')"
            ):
                await asyncio.sleep(0.1)
        counts = await prove(services.database)
        said = await rows(
            services.database,
            "SELECT count(*), count(DISTINCT chat_key) FROM messages WHERE kind = 'assistant'",
        )
    print(f"faults={faults} chats={CHATS} kills={workers.kills} rounds={counts} messages={said}")
    assert not restarts_at
