"""Answers in words, when their worker loses the chat or is asked to stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from round_bench import Bench, Model, states

from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro_agent.ports import MessageKind

OpenBench = Callable[..., Awaitable[Bench]]


class Speaker(Model):
    """Answers in words: the answers as they are, without a fence."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        answer = await super().complete(request)
        return replace(answer, text=answer.text.removeprefix("```python\n").removesuffix("\n```"))


async def said(bench: Bench) -> list[str]:
    return [item.text for item in await bench.messages("chat") if item.kind is MessageKind.ASSISTANT]


async def test_words_are_sent_once_although_their_worker_lost_the_chat(bench: Bench) -> None:
    async def lose(_: LLMRequest) -> str:
        await bench.let_leases_run_out()
        await bench.drain(Speaker("From the second."), owner="w2").drain("chat")
        return "From the first."

    await bench.say("chat", "hello")
    await bench.drain(Speaker(lose), owner="w1").drain("chat")
    (round_,) = await bench.rounds("chat")
    assert (round_.state.value, round_.attempt, round_.answer) == ("done", 2, "From the second.")
    assert round_.answered_at is not None and round_.code is None
    assert await said(bench) == ["From the second."]


async def test_a_round_that_was_asked_to_stop_sends_no_words(bench: Bench) -> None:
    async def stop(_: LLMRequest) -> str:
        await bench.services.stopper.stop("chat", reason="no", wait_seconds=0)
        return "Too late."

    await bench.say("chat", "hello")
    rounds = await bench.play("chat", bench.drain(Speaker(stop)))
    assert states(rounds) == ["cancelled"]
    assert await said(bench) == []


async def test_the_next_turn_sees_words_as_a_message_of_the_agent(open_bench: OpenBench) -> None:
    bench = await open_bench("sqlite")
    model = Speaker("It is Paris.", "Yes.")
    for question in ("Which city?", "Sure?"):
        await bench.say("chat", question)
        await bench.play("chat", bench.drain(model))
    assert await said(bench) == ["It is Paris.", "Yes."]
    assert model.prompts[1].count("It is Paris.") == 1
