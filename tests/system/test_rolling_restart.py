"""Restarting every worker, one after another, while calls and rounds keep coming."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from storage.overview import OverviewRepository
from storage.rounds import Round
from storage.states import RoundState
from workers.composition import Services

HERE = Path(__file__).parent
CALLERS = 24
CHATS = ("chat-0", "chat-1", "chat-2", "chat-3")
ANSWER = "```python\nremember('turn ${1}')\n```"


@pytest.fixture(scope="module")
def database_url(postgres_server: Any) -> str:
    """As a fleet has it."""
    url: str = postgres_server.create_database()
    return url


class Load:
    """Calls and messages without a pause, until told to stop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._stopped = asyncio.Event()
        self.asked = 0
        self.done = 0
        self.failures: list[str] = []
        self.messages = 0

    async def run(self) -> None:
        """Keep the fleet busy."""
        async with asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(self._call(number))
            for chat_key in CHATS:
                group.create_task(self._write(chat_key))

    def stop(self) -> None:
        """Ask nothing more; what was asked still ends."""
        self._stopped.set()

    async def until(self, done: int) -> None:
        """Wait until so many calls are done."""
        async with asyncio.timeout(60):
            while self.done < done:
                await asyncio.sleep(0.02)

    async def _call(self, number: int) -> None:
        while not self._stopped.is_set():
            self.asked += 1
            # Every eighth caller has a call that outlives the time between two restarts' steps.
            method, argument = ("journal", self.asked) if number % 8 else ("wait_long", 1.5)
            try:
                await self._services.invoke(
                    method, (argument,), {}, chat_key="load", user_id="u", timeout_seconds=30
                )
            except Exception as exc:  # counted: the test is about their number
                self.failures.append(f"{method}: {type(exc).__name__}: {exc}")
            self.done += 1

    async def _write(self, chat_key: str) -> None:
        while not self._stopped.is_set():
            self.messages += 1
            await self._services.receive_message(
                chat_key, f"please note {self.messages}", user_id="u", user_name="U"
            )
            await asyncio.sleep(0.5)


@pytest.fixture
def fleet(make_fleet: Callable[..., Any], tmp_path: Path) -> Any:
    """A fleet whose model is a script."""
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump([{"when": r"please note (\d+)", "answer": ANSWER}]))
    return make_fleet(
        plugins={"dirs": (HERE / "plugins", HERE / "slow_plugins")},
        llm={"script": script},
        agent={"debounce_seconds": 0},
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rolling_restart_of_every_worker_fails_no_call_and_repeats_none(fleet: Any) -> None:
    workers = await asyncio.to_thread(fleet.start, "methods", "methods", "long", "rounds", "rounds")
    services = fleet.services()
    await services.start()
    load = Load(services)
    running = asyncio.create_task(load.run())
    try:
        await load.until(200)
        for old in workers:
            await asyncio.to_thread(fleet.start, old.lane)
            old.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.process.wait, 60) == 0, old.log.read_text()[-2000:]
            old._ours.close()
            await load.until(load.done + 50)
        load.stop()
        async with asyncio.timeout(60):
            await running
        rounds = await settled_rounds(services)
        journal = (services.areas.plugin_dir("tests.probe") / "journal.txt").read_text().splitlines()
    finally:
        load.stop()
        await asyncio.gather(running, return_exceptions=True)
        await services.close()
    assert load.failures == [], f"{len(load.failures)} of {load.asked}: {load.failures[:3]}\n{fleet.logs()}"
    repeated = {line: count for line, count in Counter(filter(str.isdigit, journal)).items() if count > 1}
    assert repeated == {}
    wrong = [
        (item.state.value, item.trigger_kind.value, item.stop_type, item.error, item.output, item.calls)
        for item in rounds
        if item.state not in (RoundState.DONE, RoundState.MERGED) or item.stop_type
    ]
    assert wrong == [], fleet.logs()
    assert len(rounds) == load.messages
    print(f"{load.asked} calls and {load.messages} messages over {len(workers)} restarts")


async def settled_rounds(services: Services) -> list[Round]:
    """All rounds of the chats, once none waits or runs."""
    async with asyncio.timeout(60):
        while True:
            async with services.database.read() as transaction:
                open_rounds = await OverviewRepository(transaction.connection).rounds()
                if open_rounds.waiting + open_rounds.running == 0:
                    found = [await transaction.rounds.newest(chat, limit=1000) for chat in CHATS]
                    return [item for rounds in found for item in rounds]
            await asyncio.sleep(0.1)
