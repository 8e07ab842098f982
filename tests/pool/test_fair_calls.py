"""Calls that wait for a worker are served in turns of plugins, and of the chats that call one."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
import redis
from waiting import eventually
from worker_process import WorkerProcess, read_ledger

from broker_config.app import NekroApp
from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.broker.broker_figures import read_queues
from nekro.broker.calls import MethodCaller
from nekro.broker.delivery.fair_queue import owners_of
from nekro.broker.delivery.leases import RENEW
from nekro.broker.delivery.transport import CLAIM
from nekro.broker.publishing import PipelinePublisher
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.errors import OverloadedError
from nekro_agent.methods import Lane

QUEUE = "methods"


@dataclass(frozen=True)
class Message:
    """A task message with nothing but a name."""

    headers: dict[str, Any]
    body: tuple[list[Any], dict[str, Any], dict[str, Any]] = ((), {}, {})  # type: ignore[assignment]
    properties: dict[str, Any] = field(default_factory=dict)


class Bench:
    """A publisher and the scripts of workers, on a real Redis."""

    def __init__(self, settings: Settings) -> None:
        assert settings.broker.url is not None
        self._prefix, self._tags = settings.broker.key_prefix, count()
        self._keys = Keys(prefix=self._prefix)
        self.client = redis.Redis.from_url(settings.broker.url)
        self.publisher = PipelinePublisher(settings.broker)

    def worker_is_there(self) -> None:
        """A worker that takes turns has just reached Redis."""
        self.client.eval(RENEW, 2, "no-index", self._keys.seen(QUEUE), 60)

    async def send(self, *calls: str) -> None:
        """Publish calls, named as ``<plugin>.<chat>.<number>``."""
        for call in calls:
            plugin, chat, _ = call.split(".")
            await self.publisher.send(
                Message(headers={"id": call}),
                queue=QUEUE,
                may_repeat=False,
                owners=owners_of(f"author.{plugin}.method", chat),
            )

    def claim(self, room: int = 1) -> list[str]:
        """Claim as a worker with that much room does."""
        keys = [f"{self._prefix}{name}" for name in ("index", "held", QUEUE)]
        tags = [f"tag{next(self._tags)}" for _ in range(room)]
        found = self.client.eval(CLAIM, len(keys), *keys, 60, json.dumps(QUEUE), *tags)
        return [json.loads(raw)["headers"]["id"] for raw in found[2::3]]  # type: ignore[index]

    def claim_as_before(self) -> str | None:
        """Take a message as a worker of 0.2.0 does."""
        raw: Any = self.client.rpop(f"{self._prefix}{QUEUE}")
        return None if raw is None else json.loads(raw)["headers"]["id"]

    def left(self) -> set[str]:
        """Keys of waiting messages."""
        return {key.decode() for key in self.client.keys(f"{self._prefix}{QUEUE}*")}


@pytest.fixture
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    bench = Bench(settings)
    yield bench
    await bench.publisher.close()
    bench.client.close()


@pytest.mark.parametrize("room", [1, 3, 99])
async def test_plugins_take_turns_and_so_do_the_chats_that_call_one(bench: Bench, room: int) -> None:
    bench.worker_is_there()
    await bench.send(*(f"slow.greedy.{number}" for number in range(6)))
    await bench.send("slow.modest.0", "slow.modest.1", "quick.greedy.0", "quick.modest.0")
    taken: list[str] = []
    while found := bench.claim(room):
        taken += found
    assert taken == [
        "slow.greedy.0",
        "slow.greedy.1",
        "quick.greedy.0",
        "slow.modest.0",
        "quick.modest.0",
        "slow.greedy.2",
        "slow.modest.1",
        "slow.greedy.3",
        "slow.greedy.4",
        "slow.greedy.5",
    ]
    assert bench.left() == set()


async def test_a_newcomer_is_next_however_many_calls_wait(bench: Bench) -> None:
    bench.worker_is_there()
    await bench.send(*(f"slow.chat{number}.0" for number in range(200)))
    assert len(bench.claim(50)) == 50
    await bench.send("quick.modest.0")
    # One call lies in the queue's list, and one of the plugin that waited before is moved there first.
    assert "quick.modest.0" in bench.claim(3)


async def test_without_workers_that_take_turns_a_queue_is_served_in_order(bench: Bench) -> None:
    calls = [*(f"slow.greedy.{number}" for number in range(3)), "quick.modest.0"]
    await bench.send(*calls)
    assert [bench.claim_as_before() for _ in calls] == calls


async def test_no_call_is_stuck_behind_a_worker_that_takes_no_turns(bench: Bench) -> None:
    bench.worker_is_there()
    await bench.send("a.c.0", "a.c.1", "a.c.2")
    assert (bench.claim_as_before(), bench.claim_as_before()) == ("a.c.0", None)
    await bench.send("b.c.0")  # wakes a worker
    assert bench.claim(9) == ["b.c.0", "a.c.1", "a.c.2"]
    assert bench.left() == set()


async def test_calls_that_wait_for_their_turn_count_for_the_limit_and_the_figures(
    settings: Settings, app: NekroApp, bench: Bench
) -> None:
    bench.worker_is_there()
    bench.publisher = PipelinePublisher(settings.broker.model_copy(update={"max_queued": 4}))
    await bench.send("a.c.0", "a.c.1", "b.c.0", "b.c.1")
    with pytest.raises(OverloadedError, match="4 calls already wait"):
        await bench.send("c.c.0")
    figures = {figures.lane: figures for figures in read_queues(app)}
    assert figures[QUEUE].waiting == 4
    bench.claim()
    await bench.send("c.c.0")


@pytest.fixture
def frozen(start_worker: Callable[..., WorkerProcess]) -> Iterator[WorkerProcess]:
    """A worker with one slot that takes messages when it is sent SIGCONT."""
    worker = start_worker("asyncio", concurrency=1)
    yield worker
    worker.send(signal.SIGCONT)


async def test_a_worker_serves_a_modest_chat_beside_a_flood(
    app: NekroApp, settings: Settings, bench: Bench, frozen: WorkerProcess
) -> None:
    seen = Keys(prefix=settings.broker.key_prefix).seen(QUEUE)
    await eventually(lambda: bench.client.hget(seen, "fair"), what="the worker")
    frozen.send(signal.SIGSTOP)
    async with MethodCaller(app, settings) as caller:
        tasks = []
        for name in (*(f"m.greedy.{number}" for number in range(30)), "m.modest.0", "n.greedy.0"):
            method, chat_key, _ = name.split(".")
            now = datetime.now(UTC)
            call = Invocation(
                call_id=f"{name}.{new_id()}", method=f"{method}.wait", chat_key=chat_key, container_key="k",
                issued_at=now, deadline=now + timedelta(seconds=60), args="0",
            )  # fmt: skip
            tasks.append(asyncio.create_task(caller.call(call, lane=Lane.METHODS)))
            await eventually(
                lambda: all(one.place is not None for one in caller._pending.values()), what="the message"
            )
        frozen.send(signal.SIGCONT)
        await asyncio.gather(*tasks)
    order = [task_id.rpartition(".")[0] for task_id, what, *_ in read_ledger(settings) if what == "started"]
    assert len(order) == 32, order
    assert order.index("n.greedy.0") <= 4 and order.index("m.modest.0") <= 5
    assert [name for name in order if name.startswith("m.greedy")] == [f"m.greedy.{n}" for n in range(30)]
