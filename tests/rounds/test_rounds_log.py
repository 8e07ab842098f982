"""The log records of a round's end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger
from round_bench import Bench, Model, states

from nekro.agent.llm import LLMRequest
from nekro_agent.errors import LLMError

ENDS = {"round_ended", "round_failed", "round_cancelled", "round_interrupted", "round_failed_unexpectedly"}


@pytest.fixture
def ends() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The records of ends: event and fields."""
    found: list[tuple[str, dict[str, Any]]] = []

    def note(line: Any) -> None:
        if line.record["message"] in ENDS:
            found.append((line.record["message"], line.record["extra"]))

    sink = logger.add(note)
    yield found
    logger.remove(sink)


async def test_a_successful_round_logs_its_end_once_and_without_an_error(
    bench: Bench, ends: list[tuple[str, dict[str, Any]]]
) -> None:
    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model("# nothing to do")))
    assert [(round_.state.value, round_.error) for round_ in rounds] == [("done", None)]
    ((event, fields),) = ends
    assert (event, fields["state"], fields["round_id"]) == ("round_ended", "done", rounds[0].id)
    assert not {"error", "error_type", "exception"} & set(fields)


async def test_a_failed_round_logs_its_end_once_with_the_error(
    bench: Bench, ends: list[tuple[str, dict[str, Any]]]
) -> None:
    async def fail(_: LLMRequest) -> str:
        raise LLMError("no model")

    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(fail)))
    assert states(rounds) == ["failed"]
    ((event, fields),) = ends
    assert (event, fields["round_id"]) == ("round_failed", rounds[0].id)
    assert fields["error"] == rounds[0].error and "no model" in fields["error"]


async def test_a_stopped_round_logs_its_end_once(
    bench: Bench, ends: list[tuple[str, dict[str, Any]]]
) -> None:
    async def stop(_: LLMRequest) -> str:
        await bench.services.stopper.stop("chat", reason="no", wait_seconds=0)
        return "# too late"

    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Model(stop)))
    assert states(rounds) == ["cancelled"]
    ((event, fields),) = ends
    assert fields["round_id"] == rounds[0].id, event
