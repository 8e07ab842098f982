"""Restarts of every worker, one after another, while calls, rounds and a job run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import WAIT_SECONDS
from worker_fleet import Worker, plugin_of

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from nekro.wire.values import decode_value
from nekro_agent.api.plugin import task
from nekro_agent.ports import JobState
from storage.repositories.rounds import Round
from storage.states import RoundState, TriggerKind

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
GO_ON_SECONDS = 60
CHATS = ("chat-0", "chat-1", "chat-2", "chat-3")
SCRIPT = [
    {"when": r"woke (\S+)", "answer": "```python\nsend_msg_text(_ck, 'heard of ${1}')\n```"},
    {"when": r"please wake (\S+)", "answer": "```python\nwork(0, 0.2)\nwake('${1}')\n```"},
]
#: Requests of each caller in a loop, and their arguments beside a unique number.
CALLERS: dict[str, list[tuple[Any, ...]]] = {
    "work": [(0.0,)] * 10 + [(1.5,)] * 4,
    "keep": [()] * 4,
    "dig": [(0.3,)] * 2,
    "tick": [()] * 2,
}


@pytest.fixture(scope="module")
def database_url() -> str:
    return "sqlite:///unused.db"


class Load:
    """Calls and messages without a pause, until ``stop``."""

    def __init__(
        self,
        services: Services,
        callers: dict[str, list[tuple[Any, ...]]],
        *chats: str,
        calls_in: Sequence[str] = ("load",),
        first: int = 1,
    ) -> None:
        self._services, self._callers, self._chats, self._calls_in = services, callers, chats, calls_in
        self._stopped = asyncio.Event()
        self._numbers, self._first = itertools.count(first), first
        self.values: dict[str, list[Any]] = defaultdict(list)
        self.failures: list[str] = []
        self.messages = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for method, arguments in self._callers.items():
                for more in arguments:
                    group.create_task(self._call(method, more))
            for chat_key in self._chats:
                group.create_task(self._write(chat_key))

    def stop(self) -> None:
        """Stop sending; open calls still end."""
        self._stopped.set()

    @property
    def done(self) -> int:
        """Answered calls."""
        return sum(map(len, self.values.values()))

    async def go_on(self, count: int) -> None:
        """Wait until that many more calls are done, at least one of every kind."""
        before = {method: len(self.values[method]) for method in self._callers}
        total, end = self.done, time.monotonic() + GO_ON_SECONDS
        while still := [method for method, known in before.items() if len(self.values[method]) == known] or (
            self.done < total + count
        ):
            assert time.monotonic() < end, f"{still} does not go on: {self.failures[:3]}"
            await asyncio.sleep(0.02)

    async def _call(self, method: str, more: tuple[Any, ...]) -> None:
        while not self._stopped.is_set():
            number = next(self._numbers)
            try:
                envelope = await use_cases.invoke(
                    self._services,
                    method,
                    (number, *more),
                    {},
                    chat_key=self._calls_in[number % len(self._calls_in)],
                    user_id="u",
                    timeout_seconds=40,
                )
                self.values[method].append(decode_value(envelope.value_bytes(), max_bytes=1 << 20))
            except Exception as exc:  # counted: the test checks their number
                self.failures.append(f"{method} {number}: {type(exc).__name__}: {exc}")

    async def _write(self, chat_key: str) -> None:
        while not self._stopped.is_set():
            self.messages += 1
            await use_cases.receive_message(
                self._services,
                chat_key,
                f"please wake {chat_key}/{self._first + self.messages}",
                user_id="u",
                user_name="U",
            )
            await asyncio.sleep(0.5)


@pytest.fixture
def fleet(make_fleet: Callable[..., Any], tmp_path: Path, postgres_server: Any) -> Any:
    """A fleet with a scripted model and its own database, as owners of pinned plugins compete there."""
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump(SCRIPT))
    return make_fleet(
        database={"url": postgres_server.create_database()},
        plugins={"dirs": (HERE / "rolling_plugins",)},
        llm={"script": script},
        agent={"debounce_seconds": 0},
        workers={"long_methods": ("tests.rolling.dig",)},
    )


async def replace(fleet: Any, old: Worker, **options: Any) -> Worker:
    """SIGTERM a worker and start its successor; they overlap while the first drains."""
    old.process.terminate()
    (successor,) = await asyncio.to_thread(fleet.start, old.lane, **options)
    # Not ``stop``: a second signal would end it immediately.
    assert await asyncio.to_thread(old.process.wait, 60) == 0, old.log.read_text()[-2000:]
    assert successor.process.poll() is None
    return successor


def begun(services: Services) -> Counter[str]:
    """Number of starts of each call and each job."""
    journal = (services.areas.plugin_dir("tests.rolling") / "journal.txt").read_text()
    return Counter(line.rpartition(" ")[0] for line in journal.splitlines())


def account(load: Load, services: Services, fleet: Any) -> None:
    """Every call was answered with its own value, and none ran twice."""
    assert load.failures == [], f"{len(load.failures)} of {load.done}: {load.failures[:3]}\n{fleet.logs()}"
    counts = begun(services)
    repeated = {name: count for name, count in counts.items() if count > 1 and not name.startswith("trek")}
    repeated.pop("work 0", None)  # the number of the rounds
    assert repeated == {}, fleet.logs()
    for method in ("work", "dig"):
        assert {f"{method} {number}" for number in load.values[method]} <= counts.keys()
        assert len(set(load.values[method])) == len(load.values[method])
    assert sorted(load.values["tick"]) == list(range(1, len(load.values["tick"]) + 1))


async def test_replacing_a_worker_under_load_fails_no_call_and_repeats_none(
    make_fleet: Callable[..., Any], tmp_path: Path
) -> None:
    fleet = await asyncio.to_thread(
        make_fleet,
        database={"url": f"sqlite:///{tmp_path / 'nekro.db'}"},
        plugins={"dirs": (HERE / "rolling_plugins",)},
    )
    workers = await asyncio.to_thread(fleet.start, "methods", "methods")
    services = fleet.services()
    await services.start()
    load = Load(services, {"work": [(0.0,)] * 8 + [(0.4,)] * 4, "keep": [()] * 2})
    running = asyncio.create_task(load.run())
    try:
        await load.go_on(20)
        await replace(fleet, workers[0])
        load.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            await running
        account(load, services, fleet)
    finally:
        load.stop()
        await asyncio.gather(running, return_exceptions=True)
        await services.close()
        await asyncio.to_thread(fleet.stop)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rolling_restart_of_every_worker_fails_no_call_and_repeats_none(fleet: Any) -> None:
    lanes = ("pinned", "methods", "methods", "methods", "long", "rounds", "rounds")
    workers = await asyncio.to_thread(fleet.start, *lanes)
    services = fleet.services()
    await services.start()
    load = Load(services, CALLERS, *CHATS)
    running = asyncio.create_task(load.run())
    try:
        plugin = plugin_of(services, "tests.rolling")
        job = await task.start("trek", "far", "load", plugin)
        for old in workers:
            await load.go_on(50)
            await replace(fleet, old)
        await load.go_on(50)
        load.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            await running
        rounds = await settled_rounds(services)
        assert job.notify("enough")
        await end_of_job(services)
        account(load, services, fleet)
        await account_of_rounds(load, rounds, services, fleet)
    finally:
        load.stop()
        await asyncio.gather(running, return_exceptions=True)
        await services.close()
    print(f"{load.done} calls and {load.messages} messages over {len(workers)} restarts")


async def account_of_rounds(load: Load, rounds: list[Round], services: Services, fleet: Any) -> None:
    """Every round ended normally, and every AGENT call had one effect, one line and one round."""
    assert load.messages == sum(item.trigger_kind is TriggerKind.MESSAGE for item in rounds)
    wrong = [
        (item.state.value, item.trigger_kind.value, item.stop_type, item.error, item.output, item.calls)
        for item in rounds
        if item.state not in (RoundState.DONE, RoundState.MERGED)
        or item.stop_type not in (None, StopType.NORMAL, StopType.AGENT)
    ]
    assert wrong == [], fleet.logs()
    woken = {name for name in begun(services) if name.startswith("wake ")}
    follow_ups = [item.trigger_id for item in rounds if item.trigger_kind is TriggerKind.CALL]
    assert len(follow_ups) == len(set(follow_ups)) == len(woken) > 0
    async with services.database.read() as transaction:
        texts = [m.text for chat in CHATS for m in await transaction.messages.newest(chat, limit=5000)]
    assert Counter(text for text in texts if text.startswith("woke ")) == {
        name.replace("wake", "woke"): 1 for name in woken
    }


async def end_of_job(services: Services) -> None:
    """Check the end of the job: once, on the last of its workers."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with services.database.read() as transaction:
                job = await transaction.jobs.find_latest("tests.rolling", "trek", "far")
            if job is not None and job.state.is_final:
                break
            await asyncio.sleep(0.1)
    assert job.state is JobState.SUCCEEDED
    assert begun(services)["trek far"] == job.attempt == 2


async def settled_rounds(services: Services) -> list[Round]:
    """All rounds of the chats, once none waits or runs."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with services.database.read() as transaction:
                open_rounds = await transaction.overview.rounds()
                if open_rounds.waiting + open_rounds.running == 0:
                    found = [await transaction.rounds.newest(chat, limit=5000) for chat in CHATS]
                    return [item for rounds in found for item in rounds]
            await asyncio.sleep(0.1)
