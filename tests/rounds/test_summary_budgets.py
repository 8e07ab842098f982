"""What summaries of older messages cost: counted, warned of, and skipped over budget."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from loguru import logger
from round_bench import Bench, Model, states
from summary_bench import AGENT, Summariser, fill, numbered, summaries, versions
from waiting import eventually

from nekro.agent.llm import LLMAnswer, LLMRequest, ModelSpent
from nekro.app.budgets import day_of
from nekro.base.metrics import start_metrics
from nekro_agent.errors import BudgetExceededError, LLMError
from nekro_agent.ports import MessageKind
from nekro_client.event_types import EventType
from storage.accounts.spendings import ScopeKey, Total
from storage.states import BudgetScope

if TYPE_CHECKING:
    from collections.abc import Iterator

METRIC = "nekro_model_requests_total"
OpenBench = Callable[..., Awaitable[Bench]]


async def total(bench: Bench, scope: BudgetScope = BudgetScope.DAY, name: str = "") -> Total | None:
    key = ScopeKey.of(scope, name, day=day_of(datetime.now(UTC)))
    async with bench.database.read() as tx:
        return next(iter(await tx.spendings.totals([key])), None)


async def sums(bench: Bench, by: str) -> list[tuple[str, int, int, float]]:
    async with bench.database.read() as tx:
        found = await tx.spending_reports.sums(by, since=None, until=None, after=None, limit=9)
    return [(one.key, one.rounds, one.requests, one.cost) for one in found]


@contextmanager
def logged(event: str) -> Iterator[list[str]]:
    """Collect the chats of the records of an event."""
    chats: list[str] = []
    sink = logger.add(
        lambda message: chats.append(message.record["extra"]["chat_key"]),
        filter=lambda record: record["message"] == event,
    )
    try:
        yield chats
    finally:
        logger.remove(sink)


async def test_a_summary_is_on_the_account_of_its_chat(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, agent=AGENT)
    await fill(bench, *numbered(12))
    figures = start_metrics()
    counted = {"group": "default", "model": "tests-1"}
    before = figures.registry.get_sample_value(METRIC, counted) or 0
    assert await summaries(bench, Summariser()).summarise("chat") == 1
    for scope, name in ((BudgetScope.DAY, ""), (BudgetScope.CHAT, "chat")):
        used = await total(bench, scope, name)
        assert used is not None and (used.tokens, used.cost, used.rounds) == (107, 0.25, 0)
    assert await sums(bench, "model") == [("tests-1", 0, 1, 0.25)]
    assert await sums(bench, "chat") == [("chat", 0, 1, 0.25)]
    for by in ("plugin", "user", "key"):
        assert await sums(bench, by) == [("", 0, 1, 0.25)]
    assert figures.registry.get_sample_value(METRIC, counted) == before + 1


@pytest.mark.parametrize("scope", ["chat", "day"])
async def test_over_budget_summaries_are_skipped_and_rounds_are_as_before(
    open_bench: OpenBench, kind: str, scope: str
) -> None:
    bench = await open_bench(kind, agent=AGENT, budgets={scope: "tokens=100,rounds=99", "warn_at": 1})
    await fill(bench, *numbered(12))
    await fill(bench, *numbered(12), chat_key="other")
    model = Summariser()
    writer = summaries(bench, model)
    assert await writer.summarise("chat") == 1
    await fill(bench, *numbered(12, first=13))
    used = await total(bench)
    with logged("summary_over_budget") as chats:
        for _ in range(2):
            with pytest.raises(BudgetExceededError, match="107 of 100 tokens"):
                await writer.summarise("chat")
            writer.chat_rested("chat")
            await eventually(lambda: writer._task is None or writer._task.done(), what="the second attempt")
    assert chats == ["chat"] and await total(bench) == used
    assert len(await versions(bench)) == 1 and len(model.prompts) == 1
    # The refusal pauses no other chat.
    writer.chat_rested("other")
    await eventually(lambda: writer._task is None or writer._task.done(), what="the other chat")
    assert len(await versions(bench, "other")) == (1 if scope == "chat" else 0)
    await writer.close()


@pytest.mark.extended
async def test_a_refused_summary_leaves_the_rounds_of_its_chat_alone(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind, agent=AGENT, budgets={"chat": "tokens=300", "warn_at": 1})
    await fill(bench, *numbered(12))
    hold, asked = asyncio.Event(), asyncio.Event()

    async def wait(_: LLMRequest) -> str:
        asked.set()
        await hold.wait()
        return ""

    await bench.say("chat", "one")
    model, player = Summariser(), Model(wait)
    writer = summaries(bench, model)
    work = asyncio.create_task(bench.play("chat", bench.drain(player)))
    await asked.wait()
    with pytest.raises(BudgetExceededError):  # the estimate of the round fills the budget
        await writer.summarise("chat")
    hold.set()
    assert states(await work) == ["done"]
    assert await writer.summarise("chat") == 1  # the round used less, so there is room again
    used = await total(bench, BudgetScope.CHAT, "chat")
    assert used is not None and (used.tokens, used.rounds) == (2 * 107, 1)


async def test_a_summary_that_reaches_the_mark_warns_the_chat_and_its_events_show_it(
    open_bench: OpenBench, kind: str
) -> None:
    bench = await open_bench(kind, agent=AGENT, budgets={"chat": "tokens=110", "warn_at": 0.9})
    await fill(bench, *numbered(12))
    assert await summaries(bench, Summariser()).summarise("chat") == 1
    said = [row for row in await bench.messages("chat") if row.kind is MessageKind.ASSISTANT]
    assert [row.text[:44] for row in said] == ["Note: 97% of the budget of this chat for tod"]
    async with bench.database.read() as tx:
        events = await tx.events.after("chat", number=0, limit=200)
    sent = [event for event in events if event.type == EventType.MESSAGE_SENT]
    assert [(event.message_id, event.data["text"]) for event in sent] == [(said[0].id, said[0].text)]


class Unreported(Summariser):
    """Answers with tokens that are an estimate."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        return replace(await super().complete(request), is_estimated=True)


async def test_a_summary_without_reported_tokens_is_marked(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, agent=AGENT)
    for first, model in ((1, Summariser()), (11, Unreported())):
        await fill(bench, *numbered(12, first=first))
        assert await summaries(bench, model).summarise("chat") == 1
    assert [one.tokens_estimated for one in await versions(bench)] == [True, False]
    used = await total(bench, BudgetScope.CHAT, "chat")
    assert used is not None and used.estimated_requests == 1


class Failing(Summariser):
    """Reports a request, and no answer."""

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Fail."""
        assert request.on_spent is not None
        request.on_spent(ModelSpent(group="g", model="m", prompt_tokens=50, answer_tokens=0, cost=0.5))
        raise LLMError("no answer")


async def test_a_failed_summary_counts_what_was_sent(open_bench: OpenBench, kind: str) -> None:
    bench = await open_bench(kind, agent=AGENT)
    await fill(bench, *numbered(12))
    with pytest.raises(LLMError, match="no answer"):
        await summaries(bench, Failing()).summarise("chat")
    assert await sums(bench, "model") == [("m", 0, 1, 0.5)]
