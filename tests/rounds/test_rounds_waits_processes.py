"""A program that waits while its workers and Redis are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_process import RedisServer
from scene_model import SceneModel
from test_rounds_processes import ended, journal, opened, say
from worker_fleet import Fleet, build_fleet

from nekro.sandbox.models import StopType
from nekro_agent.ports import IncomingMessage, MessageKind
from storage.states import RoundState

pytestmark = pytest.mark.extended

#: The time is read before the first wait, and the same in each later run.
PROGRAM = """
import random, time
began, lot = time.time(), random.random()
tick(f"once {lot}")
answer = ask_user("Which one?", ["red", "blue"])
sleep_until(max(began + 5, time.time() + 12))
send_msg_text(_ck, f"{answer} {lot}")
"""


@pytest.fixture
def fleet(own_redis: RedisServer, tmp_path: Path) -> Iterator[Fleet]:
    model = SceneModel()
    model.scenes["waits"] = [PROGRAM]
    fleet = build_fleet(
        tmp_path,
        own_redis.url,
        f"sqlite:///{tmp_path}/nekro.db",
        plugins={"dirs": (Path(__file__).parent / "plugins",)},
        llm={"base_url": model.start(), "model": "tests-1", "stream": False},
        agent={"lease_seconds": 2},
    )
    fleet.start("methods", "rounds")
    yield fleet
    fleet.stop()
    assert model.asked["waits"] == 1
    model.stop()


async def test_a_program_waits_while_everything_but_the_database_is_lost(
    fleet: Fleet, own_redis: RedisServer
) -> None:
    async with opened(fleet) as services:
        await say(services, "chat", "scene:waits")
        (first,) = await ended(fleet, services, "chat")
        assert first.stop_type == StopType.WAITING
    await asyncio.to_thread(fleet.stop)
    own_redis.kill()
    own_redis.start()
    fleet.start("methods", "rounds")
    async with opened(fleet) as services:
        reply = IncomingMessage(chat_key="chat", text="blue", user_id="ada", user_name="Ada")
        receipt = await services.intake.accept(reply, issuer="sse")
        assert receipt is not None and receipt.turn_id is not None
        _, second = await ended(fleet, services, "chat")
        assert (second.stop_type, second.turn_id) == (StopType.WAITING, receipt.turn_id)
        for worker in list(fleet.workers):
            if worker.lane == "rounds":
                worker.kill()
        fleet.start("rounds")
        async with asyncio.timeout(120):
            while len(rounds := await ended(fleet, services, "chat")) < 3:
                await asyncio.sleep(0.2)
        async with services.database.read() as tx:
            messages = await tx.messages.newest("chat", limit=20)
    assert [one.state for one in rounds] == [RoundState.DONE] * 3
    (ticked,) = [line for line in journal(fleet) if line.startswith("tick")]
    sent = [one.text for one in messages if one.kind is MessageKind.ASSISTANT]
    assert sent[1:] == [f"blue {ticked.removeprefix('tick once ')}"]
