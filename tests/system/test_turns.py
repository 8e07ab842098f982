"""Turns through real rounds workers, with a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro.app import use_cases
from nekro.app.services import Services
from nekro.sandbox.models import StopType
from nekro_agent.ports import MessageKind
from storage.repositories.messages import MessageRepository
from storage.repositories.rounds import Round, RoundRepository
from storage.states import RoundState

SCRIPT = """
- when: '(?s)count to 3'
  answer: |
    ```python
    count_up(0)
    remember("never")
    ```
- when: "'next': 1}"
  answer: |
    ```python
    count_up(1)
    ```
- when: "'next': 2}"
  answer: |
    ```python
    send_msg_text(_ck, "counted to 2")
    ```
- when: 'break it'
  answer: |
    ```python
    print("before the fault")
    1 / 0
    ```
- when: 'ZeroDivisionError'
  answer: |
    ```python
    send_msg_text(_ck, "mended")
    ```
- when: 'who am I'
  answer: |
    ```python
    send_msg_text(_ck, "you are " + who()["user"])
    ```
- when: 'never end'
  answer: |
    ```python
    count_up(100)
    ```
- when: "'next': 10([0-9])}"
  answer: |
    ```python
    count_up(10${1})
    ```
"""


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("llm")
    script = directory / "script.yaml"
    script.write_text(SCRIPT)
    system = make_fleet(
        llm={"script": script, "record": directory / "requests.jsonl"},
        agent={"rounds_per_turn": 4, "lease_seconds": 3},
    )
    system.start("methods", "rounds", "rounds")
    return system


async def quiet(services: Services, chat_key: str, *, rounds: int) -> list[Round]:
    """Wait until a chat has that many ended rounds and no waiting one."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with services.database.read() as transaction:
                found = await RoundRepository(transaction.connection).newest(chat_key, limit=50)
            open_ = [r for r in found if r.state in (RoundState.REQUESTED, RoundState.RUNNING)]
            if len(found) >= rounds and not open_:
                return found
            await asyncio.sleep(0.02)


async def turn(fleet: Any, chat_key: str, text: str, *, rounds: int) -> tuple[list[Round], list[Any]]:
    services = fleet.services()
    await services.start()
    try:
        await use_cases.receive_message(services, chat_key, text, user_id="u1", user_name="Ada")
        try:
            ended = await quiet(services, chat_key, rounds=rounds)
        except TimeoutError:
            pytest.fail(f"the turn did not end\n{fleet.logs()}")
        async with services.database.read() as transaction:
            messages = await MessageRepository(transaction.connection).newest(chat_key, limit=50)
        return ended, messages
    finally:
        await services.close()


def requests_of(fleet: Any, round_id: str) -> str:
    lines = Path(fleet.settings.llm.record).read_text().splitlines()
    return "\n".join(line for line in lines if json.loads(line).get("round_id") == round_id)


async def test_agent_results_wake_the_model_once_each_and_in_order(fleet: Any) -> None:
    rounds, messages = await turn(fleet, "counting", "please count to 3", rounds=3)
    assert [(r.number, r.stop_type) for r in rounds] == [
        (1, StopType.AGENT),
        (2, StopType.AGENT),
        (3, StopType.NORMAL),
    ]
    assert len({r.turn_id for r in rounds}) == 1
    assert all(earlier.finished_at <= later.started_at for earlier, later in itertools.pairwise(rounds))
    assert {r.user_id for r in rounds} == {"u1"}
    assert "'next': 1" in requests_of(fleet, rounds[1].id)
    said = [m.text for m in messages if m.kind is MessageKind.ASSISTANT]
    assert said == ["counted to 2"]
    assert not any("never" in m.text for m in messages)


async def test_methods_get_the_user_whose_message_started_the_turn(fleet: Any) -> None:
    _, messages = await turn(fleet, "asking", "who am I", rounds=1)
    assert [m.text for m in messages if m.kind is MessageKind.ASSISTANT] == ["you are u1"]


async def test_an_error_is_shown_to_the_model_with_its_output(fleet: Any) -> None:
    rounds, messages = await turn(fleet, "breaking", "break it", rounds=2)
    assert [r.stop_type for r in rounds] == [StopType.ERROR, StopType.NORMAL]
    assert "before the fault" in requests_of(fleet, rounds[1].id)
    assert messages[-1].text == "mended"


@pytest.mark.extended
async def test_a_turn_ends_at_its_limit_and_the_chat_is_notified(fleet: Any) -> None:
    rounds, messages = await turn(fleet, "looping", "never end", rounds=4)
    assert [r.number for r in rounds] == [1, 2, 3, 4]
    assert "4 rounds" in messages[-1].text
    assert messages[-1].kind is MessageKind.ASSISTANT


@pytest.mark.extended
async def test_chats_run_concurrently_and_each_in_order(fleet: Any) -> None:
    keys = [f"qq:group/{n} #*.键" + "長" * 60 for n in range(6)]
    turns = await asyncio.gather(*(turn(fleet, key, "please count to 3", rounds=3) for key in keys))
    for rounds, _ in turns:
        assert [r.number for r in rounds] == [1, 2, 3]


async def test_a_failing_model_fails_the_round_and_notifies_the_chat(fleet: Any) -> None:
    rounds, messages = await turn(fleet, "unscripted", "nobody wrote an answer for this", rounds=1)
    assert rounds[0].state is RoundState.FAILED
    assert "could not answer" in messages[-1].text
