"""Real workers start waiting rounds in turns of their owners, whatever the order of the announcements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scene_model import HANG, SceneModel
from sqlalchemy import select
from waiting import eventually
from worker_fleet import Fleet, build_fleet

from nekro.app.services import Services
from nekro_agent.ports import IncomingMessage
from storage.states import RoundState
from storage.tables import ROUNDS

pytestmark = pytest.mark.extended

FLOOD = 40
OVER = 'print("over")'


@pytest.fixture
def model() -> Iterator[SceneModel]:
    model = SceneModel()
    yield model
    model.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def fleet(
    request: pytest.FixtureRequest, redis_server: Any, model: SceneModel, tmp_path: Path
) -> Iterator[Fleet]:
    url = f"sqlite:///{tmp_path}/nekro.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").create_database()
    llm = {"base_url": model.start(), "model": "tests-1", "stream": False}
    fleet = build_fleet(tmp_path, redis_server.url, url, llm=llm)
    yield fleet
    fleet.stop()


async def post(services: Services, chat_key: str, scene: str, *, key_id: str | None = None) -> None:
    message = IncomingMessage(chat_key=chat_key, text=f"scene:{scene}", user_id="ada", user_name="Ada")
    await services.intake.accept(message, key_id=key_id)


async def started(services: Services) -> list[str]:
    """The chats of the rounds that have started, in the order of their starts."""
    async with services.database.read() as tx:
        rows = await tx.connection.execute(
            select(ROUNDS.c.chat_key)
            .where(ROUNDS.c.state.in_([RoundState.RUNNING, RoundState.DONE]))
            .order_by(ROUNDS.c.started_at, ROUNDS.c.sequence)
        )
        return [row[0] for row in rows]


async def test_a_chat_is_answered_beside_a_key_that_floods(fleet: Fleet, model: SceneModel) -> None:
    model.scenes = {"hold": [HANG, OVER], "flood": [OVER], "other": [OVER]}
    fleet.start("rounds", concurrency=1)
    services = fleet.services()
    await services.start()
    try:
        await post(services, "flood", "hold", key_id="greedy")
        await eventually(lambda: started(services), what=fleet.waiting_for("the first round"))
        for number in range(FLOOD):
            await post(services, f"flood{number}", "flood", key_id="greedy")
        await post(services, "other", "other")
        fleet.start("rounds", concurrency=1)  # it takes the announcements in the order of the requests
        model.release("hold")

        async def all_started() -> list[str]:
            chats = await started(services)
            return chats if len(chats) == FLOOD + 2 else []

        chats = await eventually(all_started, what=fleet.waiting_for("all rounds"))
    finally:
        await services.close()
    # One slot runs the first round. What waits first is the flood's second, and then the other chat's.
    assert chats.index("other") <= 3
    assert sorted(chats) == sorted(["flood", "other", *(f"flood{number}" for number in range(FLOOD))])
