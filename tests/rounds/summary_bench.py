"""Writers of summaries in the test's own process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from round_bench import Bench, Model

from nekro.agent.llm import LLMAnswer, LLMRequest
from nekro.agent.room import ModelContexts
from nekro.app.model_meters import SummaryMeter
from nekro.app.rounds.summaries import ChatSummaries
from nekro_agent.ports import MessageKind
from storage.repositories.chats import Summary
from storage.repositories.messages import NewMessage

AGENT = {"lease_seconds": 30, "summary_group": "default", "history_messages": 8, "history_tokens": 1200}


class Summariser(Model):
    """Writes ``Summary <number>.``, or what it is given, without a fence."""

    def __init__(self, *answers: object) -> None:
        super().__init__(*(answers or [self._number]))  # type: ignore[arg-type]
        self.requests: list[LLMRequest] = []

    async def _number(self, _: LLMRequest) -> str:
        return f"Summary {len(self.prompts)}."

    async def complete(self, request: LLMRequest) -> LLMAnswer:
        """Answer."""
        self.requests.append(request)
        answer = await super().complete(request)
        return replace(answer, text=answer.text.removeprefix("```python\n").removesuffix("\n```"))


def summaries(
    bench: Bench, model: Model, *, owner: str = "w1", clock: Callable[[], float] = time.monotonic
) -> ChatSummaries:
    """What a worker writes summaries with."""
    agent = bench.settings.agent
    services = bench.services
    return ChatSummaries(
        bench.database, services.leases, ModelContexts(agent), lambda: model, agent,
        meter=SummaryMeter(services.spending, bench.settings), owner=owner, clock=clock,
    )  # fmt: skip


async def fill(bench: Bench, *texts: str, chat_key: str = "chat") -> list[str]:
    """Append messages of a person; returns their ids."""
    ids = []
    async with bench.database.begin() as tx:
        await tx.chats.ensure(chat_key)
        for text in texts:
            new = NewMessage(chat_key=chat_key, kind=MessageKind.USER, text=text, sender_name="Ann")
            ids.append((await tx.messages.append(new))[0].id)
    return ids


async def versions(bench: Bench, chat_key: str = "chat") -> list[Summary]:
    """The summaries that are kept, the newest first."""
    async with bench.database.read() as tx:
        return await tx.summaries.versions(chat_key)


def numbered(count: int, first: int = 1) -> list[str]:
    """Texts of messages."""
    return [f"message number {number}." for number in range(first, first + count)]
