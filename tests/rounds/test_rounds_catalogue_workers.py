"""A turn on real workers: the model searches three hundred methods, reads help and calls one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scene_model import SceneModel
from waiting import eventually
from worker_fleet import Fleet, build_fleet

from nekro.app import use_cases
from storage.repositories.rounds import Round
from storage.states import FINAL_ROUND_STATES

CHAT = "elephants"
ANSWERS = [
    'found = search_tools("weight elephant")\nhelp_of(*(one["name"] for one in found))',
    "send_msg_text(_ck, measure_217(amount=3))",
    'send_msg_text(_ck, "done")',
]


@pytest.fixture(scope="module")
def model() -> Iterator[SceneModel]:
    model = SceneModel()
    model.scenes = {CHAT: ANSWERS}
    yield model
    model.stop()


@pytest.fixture(scope="module")
def fleet(redis_server: Any, model: SceneModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("catalogue")
    fleet = build_fleet(
        directory,
        redis_server.url,
        f"sqlite:///{directory}/nekro.db",
        plugins={"dirs": (Path(__file__).parent / "catalogue_plugins",)},
        llm={"base_url": model.start(), "model": "tests-1", "stream": False},
    )
    fleet.start("methods", "rounds")
    yield fleet
    fleet.stop()


@pytest.mark.extended
async def test_a_model_searches_reads_help_and_calls_a_tool_out_of_300(
    fleet: Fleet, model: SceneModel
) -> None:
    services = fleet.services()
    await services.start()
    try:
        await use_cases.receive_message(
            services, CHAT, f"scene:{CHAT} how heavy is it?", user_id="ada", user_name="Ada"
        )

        async def ended() -> list[Round]:
            async with services.database.read() as tx:
                found = await tx.rounds.newest(CHAT, limit=50)
            return found if found and all(item.state in FINAL_ROUND_STATES for item in found) else []

        rounds: list[Round] = await eventually(ended, what=fleet.waiting_for("the turn"))
        async with services.database.read() as tx:
            texts = [message.text for message in await tx.messages.newest(CHAT, limit=50)]
            rows = await tx.calls.of_round(rounds[0].id)
    finally:
        await services.close()
    assert [[call["method"] for call in item.calls or []] for item in rounds] == [
        ["nekro.catalogue.search_tools", "nekro.catalogue.help_of"],
        ["tests.crowd.measure_217", "nekro.basic.send_msg_text"],
    ]
    assert texts[-1] == "217: 3 kg"
    assert [(row.method, row.state.value) for row in rows] == [("nekro.catalogue.help_of", "done")]
    first, second = ("\n".join(part["content"] for part in json.loads(prompt)) for prompt in model.prompts)
    assert "* measure_217 - Measure the weight of an elephant.\n" in first and "How many." not in first
    assert "* measure_217(amount: int, unit: str = 'kg') -> str\nMeasure the weight" in second
    assert rounds[0].prompt_chars is not None and rounds[0].prompt_chars < 40_000
