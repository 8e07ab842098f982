"""The model group of a chat, in its rounds and their events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from round_bench import Bench, Model, states

from nekro.agent.llm import FailedGroup, LLMAnswer, LLMRequest
from nekro.cli.views.turn_text import turn_lines
from nekro.operations.turns import read_turn

OpenBench = Callable[..., Awaitable[Bench]]


class Grouped(Model):
    """Answers as the group that the request names, after another one failed."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        answer = await super().complete(request)
        failed = FailedGroup(group="main", model="large", code="llm_busy", error="no")
        group = request.group or "default"
        return replace(answer, group=group, failed=(failed,), is_estimated=group == "cheap")


async def test_rounds_ask_the_group_of_their_chat_and_events_name_it(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite")
    model = Grouped("print(1)", "print(2)")
    await bench.say("chat", "hello")
    assert states(await bench.play("chat", bench.drain(model)))[0] == "done"
    async with bench.services.database.begin() as transaction:
        await transaction.chats.use_model_group("chat", "cheap")
    await bench.say("chat", "again")
    await bench.play("chat", bench.drain(model))
    async with bench.services.database.read() as transaction:
        events = await transaction.events.after("chat", number=0, limit=100)
    ready = [event.data for event in events if event.type == "code.ready"]
    assert [data["group"] for data in ready] == ["default", "cheap"]
    turns = [
        await read_turn(bench.services, str(event.turn_id)) for event in events if event.type == "code.ready"
    ]
    assert [turn.rounds[0].tokens_estimated for turn in turns] == [False, True]
    assert ["(estimated)" in str(list(turn_lines(turn))) for turn in turns] == [False, True]
    assert ready[0]["failed_groups"] == [{"group": "main", "model": "large", "code": "llm_busy"}]
