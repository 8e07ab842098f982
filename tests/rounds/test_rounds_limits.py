"""Limits of a turn: each ends the turn with a message to the chat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from round_bench import Bench, Model, states

from nekro.agent.llm import LLMRequest
from nekro.sandbox.models import StopType
from nekro_agent.ports import MessageKind

OpenBench = Callable[..., Awaitable[Bench]]


async def last_text(bench: Bench, chat_key: str) -> str:
    last = (await bench.messages(chat_key))[-1]
    assert last.kind is MessageKind.ASSISTANT
    return last.text


async def test_the_rounds_of_a_turn_are_limited(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", agent={"rounds_per_turn": 3})
    rounds = await _play(bench, Model("1 / 0", "[][0]", "{}[0]"))
    assert [(item.number, item.stop_type) for item in rounds] == [(n, StopType.ERROR) for n in (1, 2, 3)]
    assert "3 rounds" in await last_text(bench, "chat")


async def test_an_error_that_repeats_ends_the_turn(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite")
    model = Model("1 / 0", "x = 2\n1 / 0", "y = 3\n1 / 0")
    rounds = await _play(bench, model)
    assert [item.stop_type for item in rounds] == [StopType.ERROR] * 3
    notice = await last_text(bench, "chat")
    assert "3 attempts with the same result" in notice and "ZeroDivisionError: division by zero" in notice
    assert ["brought nothing new" in prompt for prompt in model.prompts] == [False, False, True]


@pytest.mark.extended
async def test_a_program_that_repeats_does_not_run_a_third_time(open_bench: OpenBench) -> None:
    bench = await open_bench("postgres")
    rounds = await _play(bench, Model('look("tea")', '\nlook("tea")  ', 'look("tea")'))
    assert [item.stop_type for item in rounds] == [StopType.AGENT] * 2 + [StopType.ERROR]
    assert "the same program for the third time" in await last_text(bench, "chat")
    assert bench.journal().count("look tea") == 2


@pytest.mark.extended
async def test_a_program_whose_result_changes_may_run_again(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite")
    code = "import time\nprint(time.monotonic_ns())\nexit(9)"
    rounds = await _play(bench, Model(code, code, code, code, 'send_msg_text(_ck, "done")'))
    assert [item.stop_type for item in rounds] == [StopType.MANUAL] * 4 + [StopType.NORMAL]
    assert await last_text(bench, "chat") == "done"


async def test_rounds_caused_by_results_count_as_well(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite", agent={"rounds_per_turn": 2})
    rounds = await _play(bench, Model('look("tea")'))
    assert [item.stop_type for item in rounds] == [StopType.AGENT, StopType.AGENT]
    assert "2 rounds" in await last_text(bench, "chat")
    assert bench.journal().count("look tea") == 2


@pytest.mark.extended
async def test_a_plugin_that_wakes_the_agent_each_time_reaches_the_limit(
    open_bench: OpenBench,
) -> None:
    bench = await open_bench("sqlite", agent={"rounds_per_turn": 2})
    model = Model("nag()")
    rounds = await _play(bench, model)
    assert states(rounds) == ["done"] * 3 and len({item.turn_id for item in rounds}) == 1
    assert len(model.prompts) == 2
    assert "2 rounds" in await last_text(bench, "chat")


@pytest.mark.extended
async def test_the_calls_of_a_round_are_limited(open_bench: OpenBench) -> None:
    bench = await open_bench("postgres", sandbox={"max_calls": 3})
    stubborn = "for n in range(6):\n    try:\n        tick(str(n))\n    except Exception:\n        pass"
    rounds = await _play(bench, Model(stubborn))
    assert [(item.state.value, item.stop_type) for item in rounds] == [("done", StopType.NORMAL)]
    assert "3 method calls" in await last_text(bench, "chat")
    assert len(rounds[0].calls or []) == 3


@pytest.mark.extended
async def test_the_time_of_a_turn_includes_that_of_the_model(open_bench: OpenBench) -> None:
    bench = await open_bench("postgres", agent={"turn_seconds": 1.5})

    async def think(_: LLMRequest) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    rounds = await _play(bench, Model(think))
    assert [(item.state.value, item.stop_type) for item in rounds] == [("done", None)]
    assert "1.5 seconds" in await last_text(bench, "chat")


@pytest.mark.extended
async def test_the_time_of_a_turn_includes_that_of_its_programs(open_bench: OpenBench) -> None:
    bench = await open_bench("postgres", agent={"turn_seconds": 6})
    rounds = await _play(bench, Model("import time\ntime.sleep(60)"))
    assert rounds[0].stop_type == StopType.TIMEOUT
    assert "6 seconds" in await last_text(bench, "chat")
    assert states(rounds) == ["done"] * len(rounds) and len(rounds) <= 3


async def _play(bench: Bench, model: Model) -> list:  # type: ignore[type-arg]
    await bench.say("chat", "hello")
    return await bench.play("chat", bench.drain(model))
